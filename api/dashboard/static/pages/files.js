/** Uploads: what they are called, which jobs use them, and when they expire. */

import { ago, bytes, dateTime, many, unix } from "../lib/format.js";
import { Problem, call, items } from "../ui/api.js";
import { copy } from "../ui/clipboard.js";
import { confirmed } from "../ui/confirm.js";
import { byId, fill, h, setText } from "../ui/dom.js";
import { maySubmit } from "../ui/me.js";
import { now, withHeadings } from "../ui/parts.js";
import { blank, notify, present } from "../ui/status.js";

/**
 * @typedef {{id: string, name: string, bytes: number, owner: string, created_at: string | null, expires_at: string | null,
 *   in_use: boolean, job_count: number, jobs: string[]}} Upload
 */

const PAGE = 100;
const more = byId("more");
/** @type {Upload[]} */
let uploads = [];
let may = false;

/** @param {string} [cursor] */
async function load(cursor = "") {
  await present("The uploads cannot be shown", async () => {
    const page = await call(`/v1/files?limit=${PAGE}${cursor && `&cursor=${encodeURIComponent(cursor)}`}`);
    uploads = cursor ? [...uploads, ...items(page)] : items(page);
    setText(byId("summary"), many(page.total, "file"));
    more.hidden = !page.next_cursor;
    more.onclick = () => void load(page.next_cursor);
    fill(byId("rows"), ...uploads.map(row));
    withHeadings(/** @type {HTMLTableElement} */ (byId("rows").parentElement));
    fill(byId("blank"), uploads.length === 0 && blank("No uploads", "Drop a file onto a new job, or: trivet upload FILE",
      may ? h("a", { class: "button", href: "/submit" }, "New job") : undefined));
  }, { again: () => void load(cursor) });
}

/** @param {Upload} upload */
function row(upload) {
  const id = h("span", { class: "code muted", title: upload.id }, `${upload.id.slice(0, 17)}…`);
  const take = h("button", { class: "tiny", type: "button", "aria-label": `Copy the id of ${upload.name || upload.id}` }, "Copy id");
  take.addEventListener("click", () => void copy(upload.id, id, "The id"));
  const made = upload.created_at === null ? null : unix(upload.created_at);
  const ends = upload.expires_at === null ? null : unix(upload.expires_at);
  const users = upload.jobs.slice(0, 3).map((job, index) => h("a", { class: "code", href: `/jobs/${encodeURIComponent(job)}` }, `${index ? ", " : ""}…${job.slice(-5)}`));
  const others = upload.job_count - users.length;
  return h("tr", { "data-file": upload.id },
    h("th", { scope: "row" }, upload.name || "unnamed", h("div", {}, id, take)), h("td", { class: "right" }, bytes(upload.bytes)),
    h("td", {}, upload.owner), h("td", { class: "muted", title: dateTime(made) }, made === null ? "–" : ago(made, now())),
    h("td", {}, h("span", {}, ...(users.length ? users : ["–"]), others > 0 && ` and ${others} more`)),
    h("td", { class: "muted" }, upload.in_use ? "in use" : ends === null ? "never" : dateTime(ends)), h("td", { class: "right" }, may && removal(upload)));
}

/** @param {Upload} upload */
function removal(upload) {
  const name = upload.name || upload.id.slice(0, 17);
  const button = h("button", { class: "button small", type: "button", "aria-label": `Delete ${name}` }, "Delete");
  button.disabled = upload.in_use;
  button.addEventListener("click", async () => {
    if (!(await confirmed(`Delete “${name}”?`, "Jobs that are over keep what came out of them, and cannot be run again without the file.", "Delete the file", true))) return;
    try {
      await call(`/v1/files/${encodeURIComponent(upload.id)}`, { method: "DELETE" });
      notify(`${name} is deleted.`);
    } catch (error) {
      if (!(error instanceof Problem)) throw error;
      notify(error.message, "error");
    }
    await load();
  });
  return button;
}

void maySubmit().then((allowed) => {
  may = allowed;
  return load();
});
