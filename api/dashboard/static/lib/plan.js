/** A pipeline's planned schedule as rows of cells. Pure. */

import { number } from "./format.js";
import { isSoft, label } from "./spans.js";

/**
 * @typedef {{op: string, stage: number, micro_batch: number, start: number, end: number}} PlannedCell
 * @typedef {{rank: number, stages: number[], peak_activations: number, peak_buffers: number, cells: PlannedCell[]}} PlannedRow
 * @typedef {{schedule: string, ranks: number, stages: number, micro_batches: number, bubble: number, duration: number, rows: PlannedRow[]}} Plan
 */

/** The order of legends. */
const OPS = ["forward", "backward", "backward_input", "backward_weight"];

/** @param {Plan} plan @returns {import("./gantt.js").Row[]} */
export const plannedRows = (plan) =>
  plan.rows.map((row) => ({
    label: `pp ${row.rank}`,
    lanes: [row.cells.map(({ op, stage, micro_batch: micro, start, end }) => ({
      start, end, tone: op, text: label(op, micro), group: micro, soft: isSoft(stage, plan.ranks),
      words: [`pipeline rank ${row.rank}`, op.replaceAll("_", " "), `stage ${stage}`, `micro-batch ${micro}`,
        `${number(start)} to ${number(end)}`].join(" · "),
    }))],
  }));

/** The kinds of work that occur. @param {Plan} plan */
export function tones(plan) {
  const found = new Set(plan.rows.flatMap((row) => row.cells.map((cell) => cell.op)));
  return [...OPS.filter((op) => found.delete(op)), ...found];
}
