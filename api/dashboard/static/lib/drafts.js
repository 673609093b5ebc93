/** First drafts of jobs: of a kind, of a model that a job trained, of another job, of a file. Pure. */

import { title } from "./state.js";

/** @typedef {import("./types.js").Job} Job */
/** @typedef {Record<string, any>} Spec */

const MODEL = { family: "mlp", in_features: 64, hidden: [128, 128], out_features: 10 };

/** Small jobs that run as they are. @type {Record<string, Spec>} */
const FIRST = {
  train: { kind: "train", name: "", model: MODEL, data: { source: "digits" }, steps: 200 },
  verify: {
    kind: "verify", name: "", model: MODEL, property: { robustness: { data: { source: "digits" }, count: 64, eps: 0.01 } }, method: "crown",
  },
  compile: { kind: "compile", name: "", model: MODEL, data: { source: "digits" } },
};

/** @param {string} kind @returns {Spec} */
export const first = (kind) => FIRST[kind] ?? { kind, name: "" };

/**
 * A draft about the model that a training job produced.
 * @param {string} kind @param {Job} job
 * @returns {Spec}
 */
export function about(kind, job) {
  const data = job.spec.data ?? { source: "digits" };
  const draft = { ...first(kind), name: `${kind === "verify" ? "robustness" : `${kind} check`} of ${title(job)}`, model: { job: job.id } };
  if (kind === "verify") return { ...draft, property: { robustness: { ...first("verify").property.robustness, data } } };
  return kind === "compile" ? { ...draft, data } : draft;
}

/** Where a file belongs by the end of its name: in a verification, or as weights of any model. */
const PLACES = [
  { ends: /\.onnx(\.gz)?$/i, of: "model", by: "onnx" },
  { ends: /\.(vnnlib|smt2)(\.gz)?$/i, of: "property", by: "vnnlib" },
  { ends: /\.zip$/i, of: "property", by: "instances" },
];

/**
 * The draft with an uploaded file in its place; null where the name does not tell where that is.
 * @param {Spec} spec @param {string} name @param {string} id
 * @returns {Spec | null}
 */
export function withFile(spec, name, id) {
  const place = PLACES.find(({ ends }) => ends.test(name));
  if (place) {
    const draft = spec.kind === "verify" ? spec : first("verify");
    return { ...draft, [place.of]: { [place.by]: id } };
  }
  if (/\.safetensors$/i.test(name) && spec.model?.family) return { ...spec, model: { ...spec.model, safetensors: id } };
  return null;
}
