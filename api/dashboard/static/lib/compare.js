/** Several jobs side by side: what their specs differ in, what came of them, and both as a table. Pure. */

import { duration, number } from "./format.js";
import { title } from "./state.js";

/** @typedef {import("./types.js").Job} Job */

/**
 * @typedef {object} Column
 * @property {string} path
 * @property {"spec" | "result"} of
 * @property {boolean} numeric whether all of its values are numbers
 */

const HASH = /^[0-9a-f]{32,}$/;
/** Fields that name a job, or that are told in another way. */
const APART = new Set(["name", "sweep"]);
/** What a result says of itself, and not of what came of the job. */
const NO_RESULT = new Set(["result", "result.completed.done", "result.completed.total", "result.completed.unit"]);
/** Verdicts instance by instance and the like are no columns. */
const DEEPEST = 3;

/**
 * Where jobs are compared. A sweep alone is compared by its jobs, which may be more than an address can name.
 * @param {Job[]} jobs
 */
export function comparePath(jobs) {
  const [first] = jobs;
  if (jobs.length === 1 && first?.children) return `/compare?sweep=${encodeURIComponent(first.id)}`;
  return `/compare?ids=${jobs.map((job) => encodeURIComponent(job.id)).join(",")}`;
}

/**
 * The fields of an object by their dotted paths. Lists are one value.
 * @param {unknown} value
 * @param {string} [path]
 * @returns {Map<string, unknown>}
 */
export function flat(value, path = "") {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return new Map([[path, value]]);
  const inside = Object.entries(value).flatMap(([key, each]) => [...flat(each, path ? `${path}.${key}` : key)]);
  return new Map(inside);
}

/**
 * Paths in the order in which they are met first.
 * @param {Iterable<unknown>[]} all
 */
const united = (all) => /** @type {string[]} */ ([...new Set(all.flatMap((paths) => [...paths]))]);

/** @param {unknown} value */
const written = (value) => JSON.stringify(value) ?? "";
/** What a chain gives each of its jobs: no spec has such a field, which a sweep might take. */
const OF_CHAIN = "job";

/**
 * The fields in which specs of one kind differ, then the numbers and words of the results that differ.
 * @param {Job[]} jobs with their specs
 * @returns {{columns: Column[], same: Map<string, unknown>, cells: Map<string, unknown>[]}} a map from path to value for
 *     each job, and what is the same in all results; the paths of results begin with `result.`
 */
export function compared(jobs) {
  const specs = jobs.map((job) => flat(job.spec ?? {}));
  const results = jobs.map((job) => flat(job.result ?? {}, "result"));
  const kinds = new Set(jobs.map((job) => job.kind));
  const alike = [...kinds].map((kind) => specs.filter((_, index) => jobs[index]?.kind === kind));
  const differing = united(specs.map((spec) => spec.keys())).filter((path) =>
    path === "kind" ? kinds.size > 1 : !APART.has(path.split(".")[0] ?? "") && alike.some((some) => differ(some, path)));
  const told = united(results.map((result) => result.keys())).filter((path) =>
    path.split(".").length <= DEEPEST && results.every((result) => isPlain(result.get(path))) && !NO_RESULT.has(path));
  const repeated = (/** @type {string} */ path) => {
    const asked = path.replace(/^result\./, "");
    return differing.includes(asked) && results.every((result, index) => written(result.get(path)) === written(specs[index]?.get(asked)));
  };
  const found = told.filter((path) => jobs.length === 1 || (differ(results, path) && !repeated(path)));
  const shared = told.filter((path) => jobs.length > 1 && !differ(results, path) && results[0]?.get(path) !== false);
  const same = new Map(shared.map((path) => [path, results[0]?.get(path)]));
  const cells = jobs.map((_, index) => new Map([...(specs[index] ?? []), ...(results[index] ?? [])]));
  const column = (/** @type {"spec" | "result"} */ of) => (/** @type {string} */ path) =>
    ({ path, of, numeric: cells.every((cell) => isNumber(cell.get(path)) || isNothing(cell.get(path))) });
  return { columns: [...differing.map(column("spec")), ...found.map(column("result"))], same, cells };
}

/** @param {Map<string, unknown>[]} specs @param {string} path */
const differ = (specs, path) => new Set(specs.map((spec) => written(spec.get(path)))).size > 1;

/** What a value looks like in a table: of a hash both ends, which tell it from others. @param {unknown} value */
export function shown(value) {
  if (isNothing(value)) return "–";
  if (typeof value === "number") return number(value);
  const text = typeof value === "string" ? value : written(value);
  return HASH.test(text) ? `${text.slice(0, 6)}…${text.slice(-4)}` : text;
}

/** @param {unknown} value */
const isNumber = (value) => typeof value === "number";
/** @param {unknown} value */
const isNothing = (value) => value === undefined || value === null;
/** @param {unknown} value */
const isPlain = (value) => isNothing(value) || isNumber(value) || typeof value === "string" || typeof value === "boolean";

/** A text without quotes where nothing could be taken for another one. @param {unknown} value */
const plainly = (value) => (typeof value === "string" && /^(?!(true|false|null)$)[A-Za-z_][\w./-]*$/.test(value) ? value : written(value));

/**
 * What a sweep gave a job, each field by the end of its path, as far as that tells them apart; of a chain, its name there.
 * @param {Job} job
 * @returns {string} empty where it is none of a sweep or chain
 */
export function swept(job) {
  const given = job.sweep ? (job.parameters ?? {}) : {};
  const paths = Object.keys(given);
  if (paths.length === 1 && paths[0] === OF_CHAIN) return String(given[OF_CHAIN]);
  return paths.map((path) => `${ending(path, paths)}=${plainly(given[path])}`).join(", ");
}

/** The shortest end of a path that begins with a name and ends no other path. @param {string} path @param {string[]} all */
function ending(path, all) {
  const parts = path.split(".");
  const ends = parts.map((_, index) => parts.slice(parts.length - 1 - index).join("."));
  return ends.find((end) => !/^\d/.test(end) && all.filter((other) => `.${other}`.endsWith(`.${end}`)).length === 1) ?? path;
}

/**
 * What tells jobs apart in a few words: the values that a sweep gave them, else their names, with the end of the id
 * where several would be called the same.
 * @param {Job[]} jobs
 * @returns {string[]}
 */
export function names(jobs) {
  const words = jobs.map((job) => swept(job) || title(job));
  /** @type {Set<string>} */
  const seen = new Set();
  const often = new Set(words.filter((word) => seen.size === seen.add(word).size));
  return words.map((word, index) => (often.has(word) ? `${word} (${jobs[index]?.id.slice(-5)})` : word));
}

/**
 * The order of rows by a column: numbers by size, others by their letters, and what is missing last either way.
 * @param {unknown[]} values
 * @param {boolean} descending
 * @returns {number[]} indices
 */
export function order(values, descending) {
  const sign = descending ? -1 : 1;
  return values.map((_, index) => index).sort((one, other) => {
    const [a, b] = [values[one], values[other]];
    if (isNothing(a) || isNothing(b)) return Number(isNothing(a)) - Number(isNothing(b));
    if (isNumber(a) && isNumber(b)) return sign * (Number(a) - Number(b));
    return sign * written(a).localeCompare(written(b), undefined, { numeric: true });
  });
}

/**
 * A table as CSV (RFC 4180). A text that a spreadsheet would take for a formula begins with an apostrophe.
 * @param {string[]} head
 * @param {unknown[][]} rows
 */
export function csv(head, rows) {
  return [head, ...rows].map((row) => row.map(csvCell).join(",")).join("\r\n").concat("\r\n");
}

/** @param {unknown} value */
function csvCell(value) {
  if (isNothing(value)) return "";
  const text = typeof value === "string" ? value.replace(/^(?=[=+\-@\t\r])/, "'") : written(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/**
 * @typedef {object} Instance
 * @property {string} name
 * @property {({verdict: string, margin: number | null, seconds: number} | null)[]} found by each job
 * @property {boolean} agreed whether all jobs that tried it say the same
 */

/**
 * What verification jobs found, instance by instance.
 * @param {import("./types.js").BoundsRow[][]} rowsByJob
 * @returns {Instance[]}
 */
export function matrix(rowsByJob) {
  const byName = rowsByJob.map((rows) => new Map(rows.map((row) => [row.name ?? `${row.instance}`, row])));
  return united(byName.map((rows) => rows.keys())).map((name) => {
    const found = byName.map((rows) => {
      const row = rows.get(name);
      return row ? { verdict: row.verdict, margin: row.margin, seconds: row.seconds } : null;
    });
    return { name, found, agreed: new Set(found.flatMap((one) => (one ? [one.verdict] : []))).size < 2 };
  });
}

/**
 * What stands above the columns of a matrix: the methods where they tell the jobs apart, else the jobs.
 * @param {Job[]} jobs @param {string[]} names
 */
export function heads(jobs, names) {
  const methods = jobs.map((job) => `${job.spec?.method ?? ""}`);
  return new Set(methods).size === jobs.length && methods.every(Boolean) ? methods : names;
}

/**
 * How each job did in all: the instances that it decided, and the time that it took for them.
 * @param {Instance[]} instances @param {number} jobs
 */
export function totals(instances, jobs) {
  return Array.from({ length: jobs }, (_, index) => {
    const found = instances.flatMap((each) => each.found[index] ?? []);
    const decided = found.filter(({ verdict }) => verdict === "verified" || verdict === "falsified").length;
    return `${number(decided)} of ${number(found.length)} decided, ${duration(found.reduce((all, { seconds }) => all + seconds, 0))}`;
  });
}
