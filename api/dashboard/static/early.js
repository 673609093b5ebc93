/**
 * Asks for a job, and for its curves where it is over, before the modules of the page are there; ui/api.js takes the
 * answers. No module: those run only after all of them were fetched.
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
})();
