/** The queue: who waits and why, which hosts take no work, and whose turn is next. */

import { duration, many, number } from "../lib/format.js";
import { remark } from "../lib/hosts.js";
import { Problem, call, items } from "../ui/api.js";
import { byId, fill, h, setText } from "../ui/dom.js";
import { QueueTable } from "../ui/queue.js";
import { blank, poll, showConnection } from "../ui/status.js";

/** @typedef {{project: string, weight: number, used_s: number, devices: number}} Share */

const POLL_MS = 2500;
const queue = new QueueTable(byId("waiting"));

/** @param {Share} share */
const row = ({ project, devices, used_s: used, weight }) =>
  h("tr", {}, h("th", { scope: "row" }, h("a", { href: `/?project=${encodeURIComponent(project)}` }, project)),
    h("td", { class: "right" }, many(devices, "device")), h("td", { class: "right" }, duration(used)), h("td", { class: "right" }, number(weight)));

async function refresh() {
  try {
    const [hosts, shares] = await Promise.all([call("/v1/hosts"), call("/v1/shares"), queue.refresh()]);
    fill(byId("limits"), ...items(hosts).map(remark).filter(Boolean).map((words) => h("li", {}, words)));
    fill(byId("projects"), ...items(shares).map(row));
    byId("shares").hidden = items(shares).length < 2;
    fill(byId("blank"), queue.element.hidden && blank("Nothing waits", "Every job has its devices."));
    setText(byId("summary"), queue.element.hidden ? "" : many(queue.waiting, "job"));
    showConnection("live");
  } catch (error) {
    if (!(error instanceof Problem)) throw error;
    showConnection("reconnecting");
    if (queue.element.hidden) fill(byId("blank"), blank("The queue cannot be shown", error.message));
  }
}

poll(refresh, POLL_MS);
