/** The one thing that people want to know of a job in a list of many, in a few words. Pure. */

import { number, percent } from "./format.js";

/** @typedef {import("./types.js").Job} Job */

/**
 * What a job is about to do, does or came to: why it waits or failed, its result.
 * @param {Job} job
 * @returns {string}
 */
export function headline(job) {
  if (job.state === "failed" && job.error) return `${job.error.type}: ${job.error.message}`;
  if (job.children) return ofSweep(job.children);
  if (job.state === "succeeded") return ofResult(job.result ?? {});
  return job.reason ?? (job.state === "running" ? (job.progress?.phase ?? "") : "");
}

/**
 * What a job's answer is, apart from its state: one that succeeded has only run to its end.
 * @param {Job} job
 * @returns {{words: string, tone: "good" | "bad" | "warn" | "plain"} | null} null where it has none
 */
export function answer(job) {
  const { verdicts: found, instances, gate: allowed, ...result } = job.result ?? {};
  if (job.state !== "succeeded") return null;
  if (typeof found?.verified === "number") {
    const all = typeof instances === "number" ? instances : Object.values(found).reduce((sum, count) => sum + count, 0);
    const tone = found.falsified > 0 ? "bad" : found.verified === all ? "good" : "warn";
    return { words: `${number(found.verified)} of ${number(all)} proved`, tone };
  }
  if (allowed && typeof allowed === "object") {
    return ["train", "inference"].some((phase) => typeof allowed[phase] === "string") ? { words: "allowed", tone: "good" } : { words: "denied", tone: "bad" };
  }
  const certified = result.eval_certified_accuracy ?? result.certified_accuracy;
  return typeof certified === "number" ? { words: `${percent(certified)} certified`, tone: "plain" } : null;
}

/**
 * How a job did, as one number of which more is better: the share that is certified, or verified, or right, or less loss.
 * @param {Job} job
 * @returns {number | null} null where the result has none
 */
export function measure(job) {
  const result = job.result ?? {};
  const { verdicts: found, instances } = result;
  if (typeof found?.verified === "number") return found.verified / (instances || 1);
  const loss = result.eval_loss ?? result.loss;
  const told = [result.eval_certified_accuracy, result.certified_accuracy, result.eval_accuracy, result.accuracy,
    typeof loss === "number" ? -loss : null, job.children?.best?.value];
  return told.find((value) => typeof value === "number") ?? null;
}

/** @param {import("./types.js").SweepJobs} children */
function ofSweep(children) {
  const told = /** @type {const} */ (["running", "queued", "failed"]).filter((state) => children[state]);
  const words = [`${number(children.succeeded ?? 0)} of ${number(children.total)} succeeded`];
  words.push(...told.map((state) => `${number(children[state])} ${state}`));
  if (children.best) words.push(`best ${number(children.best.value)}`);
  return words.join(", ");
}

/** By what the result has, so that kinds of plugins have a headline too. @param {Record<string, any>} result */
function ofResult(result) {
  if (typeof result.verdicts?.verified === "number") return verdicts(result);
  if (result.gate && typeof result.gate === "object") return gate(result.gate);
  const words = [
    part("certified", result.eval_certified_accuracy ?? result.certified_accuracy),
    part("accuracy", result.eval_accuracy ?? result.accuracy),
  ].filter(Boolean);
  if (words.length) return words.join(", ");
  const loss = result.eval_loss ?? result.loss;
  return typeof loss === "number" ? `loss ${number(loss)}` : "";
}

/** @param {string} word @param {unknown} share */
const part = (word, share) => (typeof share === "number" ? `${word} ${percent(share, 1)}` : "");

/** What its answer does not say: how many were not proved, and why not. @param {Record<string, any>} result */
const verdicts = ({ verdicts: found }) =>
  ["falsified", "unknown", "timeout"].filter((verdict) => found[verdict] > 0).map((verdict) => `${number(found[verdict])} ${verdict}`).join(", ");

/** @param {Record<string, any>} allowed rung by phase */
function gate({ train, inference }) {
  const phases = Object.entries({ train, inference }).filter(([, rung]) => typeof rung === "string");
  if (phases.length === 2 && train === inference) return `allows ${train}`;
  return phases.length ? `allows ${phases.map(([phase, rung]) => `${rung} (${phase})`).join(", ")}` : "allows no compilation";
}
