/** Alerts, for operators: what is wrong with the service, since when, and what to do about it. */

import { ago, dateTime, many, number, unix } from "../lib/format.js";
import { call, items } from "../ui/api.js";
import { byId, fill, h, setText } from "../ui/dom.js";
import { now, stateMark } from "../ui/parts.js";
import { blank, poll, present } from "../ui/status.js";

/**
 * @typedef {{name: string, severity: string, state: string, labels: Record<string, string>, value: number | null,
 *   since: string | null, meaning: string, action: string, expression: string}} Alert
 */

const POLL_MS = 15_000;

async function refresh() {
  await present("The alerts cannot be shown", async () => {
    const alerts = /** @type {Alert[]} */ (items(await call("/v1/alerts")));
    const firing = alerts.filter((alert) => alert.state === "firing").length;
    setText(byId("summary"), alerts.length ? `${many(firing, "alert")} firing` : "");
    fill(byId("alerts"), ...alerts.map(panel));
    fill(byId("blank"), alerts.length === 0 && blank("Nothing is wrong", "An alert shows up here with what to do about it. trivet alerts --all lists all of them."));
  }, { refused: () => fill(byId("alerts")) });
}

/** @param {Alert} alert */
function panel({ name, severity, state, labels, value, since, meaning, action, expression }) {
  const about = Object.entries(labels).map(([key, label]) => `${key} ${label}`).join(", ");
  const began = unix(since);
  return h("section", { class: "panel", "aria-label": name, "data-alert": name },
    h("header", {}, h("h2", {}, name), stateMark(state), h("span", { class: "note" }, severity), about && h("span", { class: "note" }, about),
      began !== null && h("span", { class: "note", title: dateTime(began) }, `since ${ago(began, now())}`)),
    h("p", {}, meaning), h("p", {}, h("strong", {}, action)),
    h("details", { class: "quiet-details" }, h("summary", { class: "muted" }, value === null ? "How it is judged" : `How it is judged; now ${number(value)}`), h("p", { class: "code" }, expression)));
}

poll(refresh, POLL_MS);
