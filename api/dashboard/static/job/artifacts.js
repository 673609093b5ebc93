/** Files that the job left, with sizes and hashes. */

import { bytes, many, unix } from "../lib/format.js";
import { isTerminal } from "../lib/state.js";
import { artifactPath, call, items, jobPath } from "../ui/api.js";
import { fill, h } from "../ui/dom.js";
import { downloadLink, showAge, withHeadings } from "../ui/parts.js";
import { blank } from "../ui/status.js";
import { Section } from "./section.js";

/** @typedef {import("../lib/types.js").Artifact} Artifact */
/** @typedef {import("../lib/types.js").Job} Job */

/** How often a job that runs is asked for its checkpoints, of which its events do not tell. */
const POLL_MS = 10_000;

export class Artifacts extends Section {
  constructor() {
    super("Artifacts", "artifacts");
    window.setInterval(() => {
      if (this.job?.state === "running" && this.job.kind === "train" && !document.hidden) void this.load(this.job);
    }, POLL_MS);
    /** @type {Artifact[]} */
    this.artifacts = [];
    /** @type {Job | null} */
    this.job = null;
  }

  /** @param {Job} job */
  async fetch(job) {
    this.job = job;
    this.artifacts = items(await call(jobPath(job.id, "/artifacts")));
    this.update(job);
  }

  /** @param {import("../lib/types.js").StreamedEvent} streamed */
  take({ event }) {
    if (event.type === "artifact" && this.job) void this.load(this.job);
  }

  /** @param {Job} job */
  show(job) {
    const ended = isTerminal(job.state) && this.job !== null && !isTerminal(this.job.state);
    this.job = job;
    if (ended) void this.load(job);
  }

  /** @param {Job} job */
  update(job) {
    this.remark(this.artifacts.length ? `${many(this.artifacts.length, "entry", "entries")} · ${bytes(total(this.artifacts))}` : "");
    const words = isTerminal(job.state) ? "This job produced no files" : "No files yet";
    fill(this.body, this.artifacts.length === 0 ? blank(words) : this.table(job));
  }

  /** @param {Job} job */
  table(job) {
    const head = h("tr", {}, h("th", { scope: "col" }, "Name"), h("th", { scope: "col", class: "right" }, "Size"),
      h("th", { scope: "col" }, "SHA-256"), h("th", { scope: "col", class: "right" }, "Written"));
    const table = h("table", { class: "table cards" }, h("thead", {}, head), h("tbody", {}, ...this.artifacts.map((artifact) => line(job, artifact))));
    withHeadings(table);
    return table;
  }
}

/** @param {Job} job @param {Artifact} artifact */
function line(job, artifact) {
  const isFolder = !artifact.sha256;
  const file = `${artifact.name.split("/").at(-1)}${isFolder ? ".tar" : ""}`;
  const link = downloadLink({ class: "code", download: file, title: isFolder && `as ${file}` },
    artifactPath(job.id, artifact.name), `${artifact.name}${isFolder ? "/" : ""}`);
  const age = h("td", { class: "right muted" });
  showAge(age, unix(artifact.created_at));
  return h("tr", {}, h("td", { class: "file" }, link), h("td", { class: "right" }, bytes(artifact.bytes)),
    isFolder ? h("td", { class: "muted" }, "folder")
      : h("td", { class: "code muted", title: artifact.sha256 }, artifact.sha256.slice(0, 12)), age);
}

/** @param {Artifact[]} artifacts */
const total = (artifacts) => artifacts.reduce((sum, artifact) => sum + artifact.bytes, 0);
