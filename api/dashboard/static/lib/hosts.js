/** What keeps a host from work, as people read it. Pure. */

/** @typedef {import("./types.js").Host} Host */

/**
 * Why a host takes no work, or does it slowly; empty where nothing is the matter.
 * @param {Host} host
 */
export function remark(host) {
  const name = `Host ${host.name}`;
  if (!host.alive) return `${name} is lost: it has not reported for a while.`;
  if (host.draining) return `${name} is draining: nothing new is placed there until it is resumed.`;
  if (host.failing) return `${name} does not start jobs: ${host.failing.reason}.`;
  return host.overcommitted ? `${name} is overcommitted: ${host.overcommitted.load} threads on average compete for its ${host.overcommitted.cores} cores.` : "";
}
