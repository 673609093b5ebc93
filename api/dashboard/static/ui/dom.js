/** Building and changing the page. Data only ever becomes text nodes and checked attributes, never markup. */

import { visible } from "../lib/format.js";

/** @typedef {Node | string | number | null | undefined | false} Child */

/**
 * A new element. Attributes that are null, undefined or false are left out; `onclick`-like names are refused.
 * @template {keyof HTMLElementTagNameMap} T
 * @param {T} tag
 * @param {Record<string, string | number | boolean | null | undefined>} [attributes]
 * @param {...Child} children
 * @returns {HTMLElementTagNameMap[T]}
 */
export function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) setAttribute(element, name, value);
  element.append(...present(children));
  return element;
}

/**
 * The element, with a value of its own for a property of its style.
 * @template {HTMLElement} T
 * @param {T} element
 * @param {string} property
 * @param {string | number} value
 * @returns {T}
 */
export function styled(element, property, value) {
  element.style.setProperty(property, String(value));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

/**
 * A new element of a drawing, as `h` makes one of the page.
 * @template {keyof SVGElementTagNameMap} T
 * @param {T} tag
 * @param {Record<string, string | number | boolean | null | undefined>} [attributes]
 * @param {...Child} children
 * @returns {SVGElementTagNameMap[T]}
 */
export function s(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) setAttribute(element, name, value);
  element.append(...present(children));
  return element;
}

/**
 * Returns a link as a whole address of this site, null if it leads elsewhere: the browser drops tabs and dots before
 * it reads what a text begins with, so only what it makes of the text can tell.
 * @param {string} link
 */
export function ownUrl(link) {
  try {
    const url = new URL(link, location.origin).href;
    return url.startsWith(`${location.origin}/`) ? url : null;
  } catch {
    return null;
  }
}

/**
 * Sets or removes an attribute, only where it differs.
 * @param {Element} element
 * @param {string} name
 * @param {string | number | boolean | null | undefined} value
 */
export function setAttribute(element, name, value) {
  if (name === "style" || /^on/i.test(name)) throw new Error(`the attribute ${name} is not for data`);
  if (value === null || value === undefined || value === false) {
    element.removeAttribute(name);
    return;
  }
  const text = value === true ? "" : name === "title" || name === "aria-label" ? visible(String(value)) : String(value);
  if (name === "href" && ownUrl(text) === null) throw new Error("links stay on this site");
  if (element.getAttribute(name) !== text) element.setAttribute(name, text);
}

/** @param {Child[]} children */
const present = (children) =>
  children.filter((child) => child !== null && child !== undefined && child !== false).map((child) =>
    child instanceof Node ? child : visible(String(child)),
  );

/**
 * Sets the text of an element, only where it differs (so selections and screen readers are left in peace).
 * @param {Element} element
 * @param {string} text
 */
export function setText(element, text) {
  const shown = visible(text);
  if (element.textContent !== shown) element.textContent = shown;
}

/**
 * @param {Element} element
 * @param {...Child} children
 */
export function fill(element, ...children) {
  element.replaceChildren(...present(children));
}

/**
 * The element of the page with this id, which the template promises.
 * @param {string} id
 * @returns {HTMLElement}
 */
export function byId(id) {
  const element = document.getElementById(id);
  if (!element) throw new Error(`the page has no #${id}`);
  return element;
}

/**
 * Runs `draw` at most once a frame, however often the result is called.
 * @param {() => void} draw
 * @returns {() => void}
 */
export function oncePerFrame(draw) {
  let waiting = false;
  return () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      draw();
    });
  };
}

/**
 * Makes the children of `parent` follow `items`: one element per key, made once, updated after, in order.
 * @template T
 * @param {Element} parent
 * @param {readonly T[]} items
 * @param {(item: T) => string} key
 * @param {(item: T) => {element: Element, update: (item: T) => void}} make
 * @param {Map<string, {element: Element, update: (item: T) => void}>} known kept by the caller between calls
 */
export function keyed(parent, items, key, make, known) {
  const wanted = new Set(items.map(key));
  for (const [name, { element }] of known) {
    if (!wanted.has(name)) {
      element.remove();
      known.delete(name);
    }
  }
  items.forEach((item, index) => {
    const name = key(item);
    let entry = known.get(name);
    if (!entry) {
      entry = make(item);
      known.set(name, entry);
    }
    entry.update(item);
    if (parent.children[index] !== entry.element) parent.insertBefore(entry.element, parent.children[index] ?? null);
  });
}
