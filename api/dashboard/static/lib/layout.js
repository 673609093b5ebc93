/** Which rank has what of a model, and where it runs. Pure. */

import { ranges } from "./format.js";

/**
 * @typedef {{rank: number, device: string}} Cell
 * @typedef {{stage: number, words: string[], cells: Cell[]}} Row ranks of one tensor-parallel group
 */

/** Ranks are numbered with `tp` fastest, then `dp_shard`, `dp_replicate` and `pp`. */
const AXES = /** @type {const} */ (["pp", "dp_replicate", "dp_shard", "tp"]);

/**
 * The ranks of a job by their places in its mesh: a row for each tensor-parallel group.
 * @param {Record<string, number>} parallel degrees
 * @param {readonly import("./types.js").HostShare[]} placement
 * @param {readonly (readonly number[])[]} stages of each pipeline rank
 * @param {number | null} blocks of the model, where they are known
 * @returns {Row[]}
 */
export function rows(parallel, placement, stages, blocks) {
  const [pp, replicas, shards, tp] = AXES.map((axis) => parallel[axis] ?? 1);
  const devices = placement.flatMap(({ host, pool, devices: own }) => own.map((device) => `${host} ${pool ?? ""} ${device}`.replace(/ +/g, " ")));
  const count = stages.flat().length || (pp ?? 1);
  return product([pp ?? 1, replicas ?? 1, shards ?? 1]).map(([stage = 0, replica = 0, shard = 0], index) => ({
    stage,
    words: [
      (pp ?? 1) > 1 && held(stages[stage] ?? [stage], count, blocks),
      (replicas ?? 1) > 1 && `replica ${replica + 1} of ${replicas}`,
      (shards ?? 1) > 1 && `shard ${shard + 1} of ${shards}`,
    ].flatMap((one) => one || []),
    cells: Array.from({ length: tp ?? 1 }, (_, column) => {
      const rank = index * (tp ?? 1) + column;
      return { rank, device: devices[rank] ?? "" };
    }),
  }));
}

/** @param {number[]} sizes @returns {number[][]} */
const product = (sizes) => sizes.reduce((all, size) => all.flatMap((some) => Array.from({ length: size }, (_, index) => [...some, index])),
  /** @type {number[][]} */ ([[]]));

/** What a pipeline rank has: its stages, and their blocks. @param {readonly number[]} stages @param {number} count @param {number | null} blocks */
function held(stages, count, blocks) {
  const words = `stage${stages.length > 1 ? "s" : ""} ${ranges(stages)} of ${count}`;
  if (blocks === null || blocks < count) return words;
  const own = stages.flatMap((stage) => blocksOf(stage, count, blocks));
  return `${words}: block${own.length > 1 ? "s" : ""} ${ranges(own)}`;
}

/** The blocks of a stage: earlier stages have one more where they do not divide. @param {number} stage @param {number} count @param {number} blocks */
function blocksOf(stage, count, blocks) {
  const [share, extra] = [Math.floor(blocks / count), blocks % count];
  const start = stage * share + Math.min(stage, extra);
  return Array.from({ length: share + (stage < extra ? 1 : 0) }, (_, index) => start + index);
}

/** What each axis divides, in sentences. @param {string} kind of job @param {Record<string, number>} parallel */
export function meaning(kind, parallel) {
  const others = kind === "verify" ? "instances" : "samples";
  const all = {
    pp: () => "A stage has its blocks, and hands activations to the next.",
    dp_replicate: () => `Replicas see other ${others}.`,
    dp_shard: (/** @type {number} */ n) => (kind === "verify" ? `Shards see other ${others}.`
      : `A shard keeps 1/${n} of the parameters, gradients and moments, gathers a layer when it needs it, and sees other ${others}.`),
    tp: (/** @type {number} */ n) => `The ranks of a row have 1/${n} of each layer that can be divided, and see the same ${others}.`,
  };
  return AXES.flatMap((axis) => ((parallel[axis] ?? 1) > 1 ? [all[axis](parallel[axis] ?? 1)] : []));
}
