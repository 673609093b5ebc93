/** A kind's JSON Schema as a list of its fields, nested ones below their parents, for people to look up. Pure. */

import { COMMON, forms, neededIn, resolved, variant } from "./schema.js";

/** @typedef {import("./schema.js").Schema} Schema */

/**
 * @typedef {object} Entry
 * @property {string} path dotted; of a form that a value may have, the field's
 * @property {number} depth how many fields it is inside of
 * @property {string | null} form what this form is called, where the entry is one of several that a value may have
 * @property {string} type in words
 * @property {string} fallback what holds where nothing is given; empty where there is no such thing
 * @property {boolean} required
 * @property {string} words what it is for
 */

const DEEPEST = 6;
const TYPES = /** @type {Record<string, string>} */ ({ integer: "whole number", number: "number", string: "text", boolean: "true or false", array: "list", object: "map" });
const LIMITS = /** @type {const} */ ([["minimum", "≥"], ["exclusiveMinimum", ">"], ["maximum", "≤"], ["exclusiveMaximum", "<"]]);

/** Every field of a kind's spec, those of every kind last. @param {Schema} root @returns {Entry[]} */
export function entries(root) {
  const all = inside(root, root, "", 0);
  const isCommon = (/** @type {Entry} */ { path }) => COMMON.has(path.split(".")[0] ?? "");
  return [...all.filter((entry) => !isCommon(entry)), ...all.filter(isCommon)];
}

/** @param {Schema} schema @param {Schema} root @param {string} path @param {number} depth @returns {Entry[]} */
function inside(schema, root, path, depth) {
  const needed = new Set(neededIn(schema));
  return Object.entries(schema.properties ?? {}).flatMap(([name, given]) => {
    const own = resolved(given, root);
    const all = forms(own, root);
    const place = path ? `${path}.${name}` : name;
    const entry = { path: place, depth, form: null, type: typeOf(all, root), fallback: fallback(own), required: needed.has(name), words: words(own.description ?? all[0]?.description) };
    const objects = depth < DEEPEST ? all.filter((one) => one.properties) : [];
    if (objects.length < 2) return [entry, ...objects.flatMap((one) => inside(one, root, place, depth + 1))];
    return [entry, ...objects.flatMap((one) => [
      { ...entry, form: variant(one, root).title, type: "", fallback: "", required: false, words: words(one.description) },
      ...inside(one, root, place, depth + 1)])];
  });
}

/** @param {Schema[]} all @param {Schema} root */
function typeOf(all, root) {
  const objects = all.filter((one) => one.properties).length;
  const told = all.filter((one) => !one.properties).map((one) => plain(one, root));
  const groups = objects > 1 ? [`one of ${objects} forms`] : objects ? ["fields"] : [];
  return [...new Set([...groups, ...told])].join(" or ");
}

/** @param {Schema} schema @param {Schema} root @returns {string} */
function plain(schema, root) {
  if (Array.isArray(schema.enum)) return schema.enum.map(String).join(", ");
  if ("const" in schema) return String(schema.const);
  const named = /^\^(job|file)_/.exec(schema.pattern ?? "")?.[1];
  if (named) return `${named} id`;
  if (schema.type === "array") {
    const each = schema.items ? typeOf(forms(resolved(schema.items, root), root), root) : "";
    return each ? `list of ${each}` : "list";
  }
  const limits = LIMITS.flatMap(([name, sign]) => (name in schema ? [`${sign} ${schema[name].toLocaleString("en")}`] : []));
  return [TYPES[schema.type] ?? "anything", limits.join(", ")].filter(Boolean).join(" ");
}

/** @param {Schema} schema */
function fallback(schema) {
  const value = schema.default;
  if (value === undefined || value === "" || (value !== null && typeof value === "object" && !Array.isArray(value))) return "";
  return value === null ? "none" : JSON.stringify(value).replaceAll('"', "").replaceAll(",", ", ");
}

/** @param {unknown} text */
const words = (text) => (typeof text === "string" ? text.replaceAll(/`/g, "").replaceAll(/\n(?!\n)/g, " ").trim() : "");

/**
 * The entries that a text leads to, with those that they are inside of.
 * @param {readonly Entry[]} all @param {string} text
 */
export function found(all, text) {
  const wanted = text.trim().toLowerCase();
  if (!wanted) return [...all];
  const paths = new Set(all.filter(({ path, form, words: told }) => [path, form ?? "", told].some((each) => each.toLowerCase().includes(wanted))).map(({ path }) => path));
  return all.filter(({ path }) => [...paths].some((one) => one === path || one.startsWith(`${path}.`)));
}
