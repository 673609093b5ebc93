/** Other jobs that asked the same of the same model, by other methods. Pure. */

/** @typedef {import("./types.js").Job} Job */

/**
 * Those of some jobs that verify the same property of the same model, newest first, this one among them; a method, with
 * what else the specs say of how, is there once.
 * @param {Job} job @param {readonly Job[]} others with their specs, newest first
 * @returns {Job[]}
 */
export function sameQuestion(job, others) {
  const asked = question(job);
  const all = [job, ...others.filter((other) => other.id !== job.id && other.kind === "verify" && other.state === "succeeded" && question(other) === asked)];
  const seen = new Set();
  return all.filter((one) => !seen.has(how(one)) && seen.add(how(one)));
}

/** @param {Job} job */
const question = ({ spec }) => JSON.stringify([spec.model ?? null, spec.property ?? null]);

/** By what a job verifies, in a few words. @param {Job} job */
export const how = ({ spec }) => [spec.rigorous && "rigorous", spec.method, spec.intermediate === "fixed" && "fixed intermediate bounds"]
  .filter(Boolean).join(", ");
