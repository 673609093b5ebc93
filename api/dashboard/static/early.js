/**
 * Asks for a job, and for its curves where it is over, before the modules of the page are there; ui/api.js takes the
 * answers. Then it asks for the modules: where the page names them, a browser fetches them all before it runs this. No
 * module: those run only after all of them were fetched.
 */
(() => {
  const path = `/v1/jobs/${location.pathname.split("/").at(-1)}`;
  const headers = { Accept: "application/json", "X-Trivet-Session": localStorage.getItem("trivet-session") ?? "" };
  /** @param {string} each */
  const ask = (each) => {
    const answer = fetch(each, { credentials: "same-origin", headers });
    answer.catch(() => undefined);
    early.set(each, answer);
    return answer;
  };
  /** @type {Map<string, Promise<Response>>} */
  const early = new Map();
  Object.assign(window, { early });
  ask(path)
    .then((response) => (response.ok ? response.clone().json() : null))
    .then((job) => {
      if (job?.kind === "train" && job.ended_at && !job.children) void ask(`${path}/metrics?max_points=2000`);
    })
    .catch(() => undefined);
  const { root, modules } = /** @type {HTMLScriptElement} */ (document.currentScript).dataset;
  for (const each of (modules ?? "").split(" ").filter(Boolean)) {
    document.head.append(Object.assign(document.createElement("link"), { rel: "modulepreload", href: `${root}/${each}` }));
  }
})();
