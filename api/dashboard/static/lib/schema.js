/** A kind's JSON Schema as the fields of a form, and specs as trees that are changed by path. Pure. */

/**
 * @typedef {Record<string, any>} Schema
 * @typedef {"text" | "number" | "choice" | "switch" | "list" | "map" | "group" | "union" | "free"} FieldType
 *
 * @typedef {object} Field
 * @property {string} path dotted
 * @property {string} name the last part of the path
 * @property {FieldType} type
 * @property {boolean} required
 * @property {string} words what it is for
 * @property {unknown} fallback what holds where nothing is given
 * @property {string | null} names what its text names: `job` or `file`
 * @property {unknown[]} choices of a choice
 * @property {Field[]} fields of a group
 * @property {Variant[]} variants of a union
 *
 * @typedef {{title: string, consts: Record<string, unknown>, needed: string[], known: string[], schema: Schema}} Variant
 */

/** Fields of every kind: how a job runs rather than what it does. */
export const COMMON = new Set(["labels", "priority", "preemptible", "retries", "timeout_s", "stall_s", "after", "parallel", "max_hosts", "device",
  "launcher", "seed", "notify", "sweep"]);

/** Deeper groups are edited as text. */
const DEEPEST = 4;

/**
 * A schema with its reference followed; what stands beside the reference goes first.
 * @param {Schema} schema @param {Schema} root @returns {Schema}
 */
export function resolved(schema, root) {
  if (typeof schema.$ref !== "string") return schema;
  const { $ref, ...beside } = schema;
  return { ...resolved(root.$defs?.[$ref.split("/").at(-1) ?? ""] ?? {}, root), ...beside };
}

/**
 * The forms that a value may have, without null and with unions of unions as one.
 * @param {Schema} schema @param {Schema} root @returns {Schema[]}
 */
export function forms(schema, root) {
  const all = schema.oneOf ?? schema.anyOf;
  if (!Array.isArray(all)) return [schema];
  return all.map((one) => resolved(one, root)).filter((one) => one.type !== "null").flatMap((one) => forms(one, root));
}

/**
 * The fields of a kind's spec.
 * @param {Schema} root
 * @returns {Field[]}
 */
export const fieldsOf = (root) => inside(root, root, "", 0);

/**
 * The fields of an object that has this schema.
 * @param {Schema} schema @param {Schema} root @param {string} path @param {number} depth
 * @returns {Field[]}
 */
export function inside(schema, root, path, depth) {
  const needed = new Set(neededIn(schema));
  return Object.entries(schema.properties ?? {}).map(([name, each]) =>
    field(each, root, path ? `${path}.${name}` : name, name, needed.has(name), depth));
}

/**
 * The fields that an object needs, those too that something rarer may stand for.
 * @param {Schema} schema
 * @returns {string[]}
 */
export const neededIn = (schema) => [...(schema.required ?? []), ...(schema["x-needed"] ?? [])];

/** @param {Schema} given @param {Schema} root @param {string} path @param {string} name @param {boolean} required @param {number} depth @returns {Field} */
function field(given, root, path, name, required, depth) {
  const schema = resolved(given, root);
  const all = forms(schema, root);
  const only = { ...(all.length === 1 ? all[0] : {}), description: schema.description ?? all[0]?.description };
  const common = { path, name, required, words: firstParagraph(only.description), fallback: schema.default, names: null, choices: [], fields: [], variants: [] };
  if (all.length > 1) return severalForms(all, root, common);
  if (Array.isArray(only.enum)) return { ...common, type: "choice", choices: only.enum };
  if ("const" in only) return { ...common, type: "choice", choices: [only.const] };
  if (only.type === "boolean") return { ...common, type: "switch" };
  if (only.type === "integer" || only.type === "number") return { ...common, type: "number" };
  if (only.type === "string") return { ...common, type: "text", names: /^\^(job|file)_/.exec(only.pattern ?? "")?.[1] ?? null };
  if (only.type === "array") return { ...common, type: isPlain(resolved(only.items ?? {}, root)) ? "list" : "free" };
  if (only.properties && depth < DEEPEST) return { ...common, type: "group", fields: inside(only, root, path, depth + 1) };
  const values = Object.values(only.patternProperties ?? {})[0] ?? only.additionalProperties;
  return { ...common, type: values?.type === "string" ? "map" : "free" };
}

/** @param {Schema[]} all @param {Schema} root @param {Omit<Field, "type">} common @returns {Field} */
function severalForms(all, root, common) {
  if (!all.every((one) => one.properties)) {
    const choices = all.flatMap((one) => one.enum ?? ("const" in one ? [one.const] : one.type === "boolean" ? [false, true] : [null]));
    return choices.includes(null) ? { ...common, type: "free" } : { ...common, type: "choice", choices };
  }
  return { ...common, type: "union", variants: all.map((one) => variant(one, root)) };
}

/** @param {Schema} schema */
const isPlain = (schema) => ["string", "number", "integer"].includes(schema.type);

/** @param {unknown} text */
const firstParagraph = (text) => (typeof text === "string" ? (text.split("\n\n")[0] ?? "").replaceAll("\n", " ").replaceAll("``", "") : "");

/** @param {Schema} schema @param {Schema} root @returns {Variant} */
export function variant(schema, root) {
  const properties = Object.entries(schema.properties).map(([name, each]) => [name, resolved(each, root)]);
  const consts = Object.fromEntries(properties.flatMap(([name, each]) => ("const" in each ? [[name, each.const]] : [])));
  const needed = /** @type {string[]} */ (schema.required ?? []);
  const own = needed.filter((name) => /^(job|safetensors|huggingface|onnx)$/.test(name));
  const title = [Object.values(consts).join(", "), ...own].filter(Boolean).join(" from ") || needed[0] || String(schema.title ?? "");
  return { title, consts, needed, known: Object.keys(schema.properties), schema };
}

/**
 * Which variant a value has: the one whose constants and fields fit best; -1 where nothing is given.
 * @param {Variant[]} variants
 * @param {unknown} value
 */
export function chosen(variants, value) {
  if (value === null || typeof value !== "object") return -1;
  const given = /** @type {Record<string, unknown>} */ (value);
  let best = 0;
  let most = Number.NEGATIVE_INFINITY;
  variants.forEach(({ consts, needed, known }, index) => {
    const fits = Object.entries(consts).map(([name, wanted]) => (given[name] === wanted ? 4 : name in given ? -8 : 0));
    const has = [...needed.map((name) => (name in given ? 2 : -1)), ...Object.keys(given).map((name) => (known.includes(name) ? 0 : -2))];
    const score = [...fits, ...has].reduce((/** @type {number} */ sum, one) => sum + one, 0);
    if (score > most) [best, most] = [index, score];
  });
  return best;
}

/** @param {unknown} value @param {string} path */
export function at(value, path) {
  /** @type {any} */
  let found = value;
  for (const name of path.split(".")) found = found !== null && typeof found === "object" ? found[name] : undefined;
  return found;
}

/**
 * A copy with a value at a path; undefined takes it away, and with it what became empty around it.
 * @param {unknown} tree @param {string} path @param {unknown} value
 * @returns {Record<string, unknown>}
 */
export function changed(tree, path, value) {
  const [name = "", ...rest] = path.split(".");
  const copy = tree !== null && typeof tree === "object" && !Array.isArray(tree) ? { ...tree } : {};
  const inner = /** @type {Record<string, unknown>} */ (copy);
  if (rest.length === 0) {
    if (value === undefined) delete inner[name];
    else inner[name] = value;
    return inner;
  }
  const below = changed(inner[name], rest.join("."), value);
  if (value === undefined && Object.keys(below).length === 0) delete inner[name];
  else inner[name] = below;
  return inner;
}

/**
 * A spec without what holds anyway. Constants that say which variant a value has are kept.
 * @param {Record<string, any>} spec
 * @param {Schema} root
 */
export const withoutDefaults = (spec, root) => ({ kind: spec.kind, ...pruned(spec, { schema: root, tagged: true }, root) });

/**
 * @param {Record<string, any>} value @param {{schema: Schema, tagged: boolean}} form what it may have; tagged where a constant says so
 * @param {Schema} root @returns {Record<string, any>}
 */
function pruned(value, { schema, tagged }, root) {
  /** @type {Record<string, any>} */
  const kept = {};
  for (const [name, each] of Object.entries(value)) {
    const own = resolved(schema.properties?.[name] ?? {}, root);
    if ("default" in own && !(tagged && "const" in own) && same(each, own.default)) continue;
    if (!("default" in own) && !(schema.required ?? []).includes(name) && isEmpty(each)) continue;
    kept[name] = each !== null && typeof each === "object" && !Array.isArray(each) ? pruned(each, formOf(each, own, root), root) : each;
  }
  return kept;
}

/** @param {unknown} value @param {Schema} schema @param {Schema} root */
function formOf(value, schema, root) {
  const all = forms(schema, root);
  const objects = all.filter((one) => one.properties);
  const found = objects[chosen(objects.map((one) => variant(one, root)), value)];
  return { schema: found ?? all[0] ?? {}, tagged: objects.length > 1 };
}

/** @param {unknown} one @param {unknown} other @returns {boolean} */
export function same(one, other) {
  if (one === other) return true;
  if (one === null || other === null || typeof one !== "object" || typeof other !== "object") return false;
  const names = new Set([...Object.keys(one), ...Object.keys(other)]);
  return [...names].every((name) => same(/** @type {any} */ (one)[name], /** @type {any} */ (other)[name]));
}

/** @param {unknown} value */
const isEmpty = (value) => value === null || (typeof value === "object" && Object.keys(value).length === 0);

/**
 * What a text in a field stands for; undefined where it is empty.
 * @param {Field} field @param {string} text
 * @returns {unknown}
 */
export function read(field, text) {
  const plain = text.trim();
  if (plain === "") return undefined;
  if (field.type === "list") return plain.replace(/^\[|\]$/g, "").split(",").map((one) => one.trim()).filter(Boolean).map(scalar);
  if (field.type === "map") {
    return Object.fromEntries(plain.split(",").map((one) => {
      const [, key = "", value = ""] = /^([^=]*)=?(.*)$/s.exec(one) ?? []; // a value may have more of these signs, as `>= 0.9`
      return [key.trim(), value.trim()];
    }));
  }
  if (field.type === "text") return plain;
  if (field.type === "free") return parsed(plain);
  return scalar(plain);
}

/** A number, but for a large one of which digits would become others. @param {string} text */
function scalar(text) {
  const value = Number(text);
  const isExact = Math.abs(value) <= Number.MAX_SAFE_INTEGER || digits(text) === digits(String(value));
  return text !== "" && Number.isFinite(value) && isExact ? value : text;
}

/** The digits of a number without its sign, its power of ten and the zeros around them. @param {string} text */
const digits = (text) => text.replace(/e.*/i, "").replace(/[^\d]/g, "").replace(/^0+|0+$/g, "");

/** @param {string} text */
function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return text;
  }
}

/**
 * How a value stands in a field, so that `read` gives it back.
 * @param {Field} field @param {unknown} value
 */
export function shown(field, value) {
  if (value === undefined || value === null) return "";
  if (field.type === "list" && Array.isArray(value)) return value.join(", ");
  if (field.type === "map" && typeof value === "object") return Object.entries(value).map(([key, each]) => (each === "" ? key : `${key}=${each}`)).join(", ");
  return typeof value === "string" ? value : JSON.stringify(value);
}
