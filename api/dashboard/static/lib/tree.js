/** The tree that a search split, laid out: a row for each depth, as wide as the leaves that it has. */

import { fixed, many, number } from "./format.js";

/**
 * @typedef {{technique: string, specification: number, names: string[], parent: (number | null)[], on: (number | null)[],
 *   side: number[], at: (number | null)[], margin: (number | null)[], state: string[], below: number[], open_below: number[],
 *   stuck_below?: number[],
 *   counterexample: number | null}} SplitTree as the API has it: a row for each domain, parents first
 * @typedef {{index: number, from: number, to: number, depth: number}} Place of a domain, in leaves
 */

/** What a domain is drawn as, and what that is called. @type {readonly (readonly [string, string])[]} */
export const STATES = [["split", "split"], ["verified", "verified"], ["open", "open"], ["stuck", "cannot be split"], ["counterexample", "counterexample"]];

/** The halves of every domain. @param {SplitTree} tree */
export function halves(tree) {
  /** @type {number[][]} */
  const found = tree.parent.map(() => []);
  tree.parent.forEach((parent, index) => parent !== null && found[parent]?.push(index));
  return found;
}

/** Domains without one above. @param {SplitTree} tree */
export const roots = (tree) => tree.parent.flatMap((parent, index) => (parent === null ? [index] : []));

/**
 * Where the domains below some are, side by side: parents before their halves.
 * @param {number[][]} below
 * @param {readonly number[]} tops
 * @returns {Place[]}
 */
export function places(below, tops) {
  const leaves = below.map(() => 1);
  for (let index = below.length - 1; index >= 0; index -= 1) {
    const own = below[index] ?? [];
    if (own.length) leaves[index] = own.reduce((sum, each) => sum + (leaves[each] ?? 1), 0);
  }
  /** @type {Place[]} */
  const found = [];
  /** @type {[number, number, number][]} */
  const waiting = [];
  const put = (/** @type {readonly number[]} */ row, /** @type {number} */ from, /** @type {number} */ depth) => {
    for (const index of row) {
      waiting.push([index, from, depth]);
      from += leaves[index] ?? 1;
    }
  };
  put(tops, 0, 0);
  for (let next = waiting.shift(); next; next = waiting.shift()) {
    const [index, from, depth] = next;
    found.push({ index, from, to: from + (leaves[index] ?? 1), depth });
    put(below[index] ?? [], from, depth + 1);
  }
  return found;
}

/** From the root to a domain, itself last. @param {SplitTree} tree @param {number} index */
export function path(tree, index) {
  const found = [index];
  for (let above = tree.parent[index]; above !== null && above !== undefined; above = tree.parent[above]) found.unshift(above);
  return found;
}

/** What is drawn of a domain: its state, open where anything below it that is not shown waits, stuck where that is. @param {SplitTree} tree @param {number} index */
export function stateOf(tree, index) {
  if (tree.counterexample === index) return "counterexample";
  if ((tree.below[index] ?? 0) > 0) return (tree.open_below[index] ?? 0) > 0 ? "open" : (tree.stuck_below?.[index] ?? 0) > 0 ? "stuck" : "verified";
  return tree.state[index] ?? "open";
}

/** What tells a domain from its parent, such as `relu_1 [3] ≥ 0`. @param {SplitTree} tree @param {number} index */
export function condition(tree, index) {
  const on = tree.on[index];
  if (on === null || on === undefined) return roots(tree).length > 1 ? `disjunct ${index}` : "the whole input set";
  return `${tree.names[on]} ${(tree.side[index] ?? 1) > 0 ? "≥" : "≤"} ${fixed(tree.at[index] ?? null)}`;
}

/** All that is known of a domain, in words. @param {SplitTree} tree @param {number[][]} below @param {number} index */
export function words(tree, below, index) {
  const first = below[index]?.[0];
  const on = first === undefined ? null : tree.on[first];
  const more = tree.below[index] ?? 0;
  return [
    Object.fromEntries(STATES)[stateOf(tree, index)],
    tree.margin[index] !== null && `margin ${fixed(tree.margin[index] ?? null)}`,
    typeof on === "number" && `split on ${tree.names[on]} at ${fixed(tree.at[first ?? 0] ?? null)}`,
    more > 0 && `${many(more, "domain")} below, not drawn, ${number(tree.open_below[index] ?? 0)} of them open`,
  ].filter(Boolean).join(" · ");
}

/** Leaves in each state. @param {SplitTree} tree @param {number[][]} below */
export function tally(tree, below) {
  /** @type {Record<string, number>} */
  const found = {};
  below.forEach((own, index) => {
    const state = own.length ? "split" : stateOf(tree, index);
    found[state] = (found[state] ?? 0) + 1;
  });
  return found;
}
