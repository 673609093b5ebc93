/** Projects: who is a member, what each may use, and what it uses. */

import { dateTime, many, percent, unix } from "../lib/format.js";
import { quotaLines } from "../lib/quotas.js";
import { call, items } from "../ui/api.js";
import { byId, fill, h, setText } from "../ui/dom.js";
import { present } from "../ui/status.js";

/**
 * @typedef {{name: string, description: string, created_at: string | null, quotas: Record<string, number | null>,
 *   usage: Record<string, number>, members: {name: string, role: string}[]}} Project
 */

async function refresh() {
  await present("The projects cannot be shown", async () => {
    const names = /** @type {{name: string}[]} */ (items(await call("/v1/projects"))).map(({ name }) => name);
    const projects = /** @type {Project[]} */ (await Promise.all(names.map((name) => call(`/v1/projects/${encodeURIComponent(name)}`))));
    setText(byId("summary"), many(projects.length, "project"));
    fill(byId("projects"), ...projects.map(panel));
    fill(byId("blank"));
  }, { again: () => void refresh() });
}

/** @param {Project} project */
function panel(project) {
  const made = unix(project.created_at);
  return h("section", { class: "panel", "aria-label": `Project ${project.name}`, "data-project": project.name },
    h("header", {}, h("h2", {}, h("a", { href: `/?project=${encodeURIComponent(project.name)}` }, project.name)),
      h("span", { class: "note" }, made === null ? "the project of whoever names none" : `since ${dateTime(made)}`)),
    project.description && h("p", { class: "about" }, project.description),
    h("table", { class: "table quotas" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "What"), h("th", { scope: "col", class: "right" }, "Used"),
      h("th", { scope: "col", class: "right" }, "Quota"), h("th", { scope: "col" }, h("span", { class: "unseen" }, "Share")))),
    h("tbody", {}, ...quotaLines(project.quotas, project.usage).map(line))),
    h("h3", {}, "Members"), members(project));
}

/** @param {import("../lib/quotas.js").QuotaLine} quota */
function line({ label, used, most, share }) {
  const meter = share !== null && h("meter", { min: 0, max: 1, high: 0.9, low: 0.9, optimum: 0, value: share, "aria-label": `${label}: ${percent(share)} of the quota`, title: percent(share) });
  return h("tr", {}, h("th", { scope: "row" }, label), h("td", { class: "right" }, used), h("td", { class: "right muted" }, most), h("td", { class: "right" }, meter));
}

/** @param {Project} project */
function members({ members: all, created_at: made }) {
  if (all.length) return h("ul", { class: "members" }, ...all.map(({ name, role }) => h("li", {}, name, " ", h("span", { class: "muted" }, role))));
  return h("p", { class: "muted" }, made === null ? "Whoever has a key of it." : "None yet: trivet projects members set.");
}
void refresh();
