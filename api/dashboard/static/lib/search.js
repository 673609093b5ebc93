/** How searches for verdicts go on: moments by instance. Pure. */

/** @typedef {{domains: number, open: number, bound: number | null, seconds: number}} Moment */

export const CAP = 4000;

/**
 * Takes one `search` event in. One that is not later than the last belongs to a search that began anew, and replaces
 * what came after it; so an event that a snapshot already holds changes nothing.
 * @param {Map<number, Moment[]>} searches
 * @param {import("./types.js").JobEvent} event
 */
export function take(searches, event) {
  const moments = searches.get(event.instance) ?? [];
  const { domains, open, bound, seconds } = event;
  while (moments.length && /** @type {Moment} */ (moments.at(-1)).seconds >= seconds) moments.pop();
  moments.push({ domains, open, bound, seconds });
  // Every other moment tells the same story: the first and the last stay.
  if (moments.length > CAP) moments.splice(0, moments.length, ...moments.filter((_, index) => index % 2 === 0 || index === moments.length - 1));
  searches.delete(event.instance);
  searches.set(event.instance, moments);
}

/**
 * The instance that was heard of last.
 * @param {Map<number, Moment[]>} searches
 */
export const latest = (searches) => [...searches.keys()].at(-1) ?? null;

/**
 * The instance whose search took longest.
 * @param {Map<number, Moment[]>} searches
 */
export const longest = (searches) =>
  [...searches].reduce((/** @type {[number, number] | null} */ most, [instance, moments]) => {
    const seconds = moments.at(-1)?.seconds ?? 0;
    return most && most[1] >= seconds ? most : [instance, seconds];
  }, null)?.[0] ?? null;

/** Moments of a search that are few enough to be marked. */
const FEW = 12;

/**
 * Curves of one search over its seconds: domains visited and open, and the bound that is proved over all of them.
 * @param {readonly Moment[]} moments
 */
export function curves(moments) {
  const x = moments.map((moment) => moment.seconds);
  const marked = moments.length <= FEW;
  return {
    domains: [
      { name: "visited", marked, x, y: moments.map((moment) => moment.domains) },
      { name: "open", marked, x, y: moments.map((moment) => moment.open) },
    ],
    bound: [{ name: "bound", marked, x, y: moments.map((moment) => moment.bound ?? Number.NaN) }],
  };
}
