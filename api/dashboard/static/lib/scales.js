/** Axes: linear and logarithmic scales and their ticks. Pure. */

/**
 * @typedef {object} Scale
 * @property {(value: number) => number} at position in pixels; NaN where the scale has no place for the value
 * @property {(pixel: number) => number} invert
 * @property {[number, number]} domain
 * @property {boolean} log
 */

/**
 * @param {[number, number]} domain
 * @param {[number, number]} range pixels
 * @returns {Scale}
 */
export function linear([low, high], [from, to]) {
  const span = high - low || 1;
  return {
    at: (value) => from + ((value - low) / span) * (to - from),
    invert: (pixel) => low + ((pixel - from) / (to - from || 1)) * span,
    domain: [low, high],
    log: false,
  };
}

/**
 * Zero, which has no logarithm, stands at the foot of the axis; `footed` makes room for it there.
 * @param {[number, number]} domain positive
 * @param {[number, number]} range pixels
 * @returns {Scale}
 */
export function logarithmic([low, high], [from, to]) {
  const base = Math.log10(low);
  const span = Math.log10(high) - base || 1;
  return {
    at: (value) => (value > 0 ? from + ((Math.log10(value) - base) / span) * (to - from) : value === 0 ? from : Number.NaN),
    invert: (pixel) => 10 ** (base + ((pixel - from) / (to - from || 1)) * span),
    domain: [low, high],
    log: true,
  };
}

/**
 * About `count` round ticks (1, 2 or 5 times a power of ten) inside [low, high].
 * @param {number} low
 * @param {number} high
 * @param {number} count
 * @returns {number[]}
 */
export function linearTicks(low, high, count) {
  const step = roundStep((high - low) / Math.max(count, 1));
  if (!(step > 0) || !Number.isFinite(step)) return [low];
  const ticks = multiples(step, low, high);
  return ticks.length > 1 || count > 12 ? ticks : linearTicks(low, high, count * 2);
}

/** Steps of seconds, minutes, hours and days that a clock has. */
const CLOCK = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200, 86_400];

/**
 * Ticks of an axis of seconds, at times that a clock shows: whole minutes where there are several, then hours, then days.
 * @param {number} low
 * @param {number} high
 * @param {number} count
 * @returns {number[]}
 */
export function timeTicks(low, high, count) {
  const rough = (high - low) / Math.max(count, 1);
  const day = 86_400;
  if (rough < 1) return linearTicks(low, high, count);
  const step = CLOCK.find((each) => each >= rough) ?? day * Math.ceil(rough / day);
  return multiples(step, low, high);
}

/** @param {number} step @param {number} low @param {number} high */
function multiples(step, low, high) {
  const ticks = [];
  const last = Math.floor(high / step + 1e-9);
  // Numbers have no more digits to tell such ticks apart.
  if (Math.abs(last) > 1e15) return [low];
  for (let index = Math.ceil(low / step - 1e-9); index <= last; index += 1) ticks.push(Number((index * step).toPrecision(15)));
  return ticks;
}

/** @param {number} rough */
function roundStep(rough) {
  const power = 10 ** Math.floor(Math.log10(rough));
  const lead = rough / power;
  return power * (lead < Math.SQRT2 ? 1 : lead < Math.sqrt(10) ? 2 : lead < Math.sqrt(50) ? 5 : 10);
}

/**
 * Ticks of a logarithmic axis: powers of ten, with 2 and 5 between them where there is room.
 * @param {number} low positive
 * @param {number} high
 * @param {number} count
 * @returns {number[]}
 */
export function logTicks(low, high, count) {
  const first = Math.floor(Math.log10(low));
  const last = Math.ceil(Math.log10(high));
  const decades = last - first;
  const inside = (/** @type {number} */ tick) => tick >= low * (1 - 1e-9) && tick <= high * (1 + 1e-9);
  const powers = Array.from({ length: decades + 1 }, (_, index) => Number((10 ** (first + index)).toPrecision(12)));
  if (decades * 3 > count * 2) {
    const whole = powers.filter(inside);
    const stride = Math.max(Math.ceil((whole.length - 1) / Math.max(count, 1)), 1);
    if (whole.length >= 2) return whole.filter((_, index) => index % stride === 0);
  }
  const ticks = powers.flatMap((power) => [1, 2, 5].map((lead) => Number((lead * power).toPrecision(12)))).filter(inside);
  return ticks.length >= 2 ? ticks : linearTicks(low, high, count).filter((tick) => tick > 0);
}

/**
 * A logarithmic axis' interval with a foot of a tenth of its length, where zero stands apart from the least value.
 * @param {[number, number]} interval positive
 * @returns {[number, number]}
 */
export const footed = ([low, high]) => [low / (high / low) ** (1 / 9), high];

/**
 * The ticks whose labels do not run into one another: each at least `room` pixels from those before it.
 * @param {readonly number[]} ticks
 * @param {Scale} scale
 * @param {number} room
 */
export function apart(ticks, scale, room) {
  /** @type {number[]} */
  const kept = [];
  for (const tick of ticks) {
    if (kept.every((other) => Math.abs(scale.at(other) - scale.at(tick)) >= room)) kept.push(tick);
  }
  return kept;
}

/**
 * The smallest interval holding all finite values of all arrays (positive ones only when `positive`), or null.
 * @param {readonly (readonly number[])[]} arrays
 * @param {boolean} [positive]
 * @returns {[number, number] | null}
 */
export function extent(arrays, positive = false) {
  let low = Number.POSITIVE_INFINITY;
  let high = Number.NEGATIVE_INFINITY;
  for (const values of arrays) {
    for (const value of values) {
      if (!Number.isFinite(value) || (positive && value <= 0)) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return low <= high ? [low, high] : null;
}

/**
 * An interval with some air around it, so that curves do not touch the frame; a single value gets room too.
 * @param {[number, number]} interval
 * @param {boolean} log
 * @returns {[number, number]}
 */
export function padded([low, high], log) {
  if (log) {
    const factor = low === high ? 2 : (high / low) ** 0.06;
    return [low / factor, high * factor];
  }
  const air = low === high ? Math.abs(low) * 0.1 || 1 : (high - low) * 0.07;
  return [low >= 0 && low - air < 0 ? 0 : low - air, high + air];
}

/** Short forms: from which size on, and down to which power of ten they are shorter than all digits. */
const UNITS = [{ letter: "M", zeros: 6, from: 1e6, least: 3 }, { letter: "k", zeros: 3, from: 1e4, least: 2 }];
/** Digits after the point up to which a power of ten is shorter. */
const LEAD = 5;

/**
 * Short labels: `20k`, `0.02`, `1e−4`. With a step they have the digits that tell neighbouring ticks apart, and no more.
 * @param {number} value
 * @param {number} [step] from one tick to the next
 */
export function tickLabel(value, step) {
  const most = Math.abs(value) >= 1e4 ? 9 : 6;
  const digits = step === undefined ? most : power(value) - power(step) + 1;
  if (value === 0 || digits < 1) return "0";
  const rounded = Number(value.toPrecision(Math.min(digits, 15)));
  const place = step === undefined ? Number.POSITIVE_INFINITY : power(step);
  return shortest(rounded, place).replaceAll("-", "−").replace("e+", "e");
}

/** @param {number} value @param {number} place of the last digit that it needs: a power of ten */
function shortest(value, place) {
  const size = Math.abs(value);
  if (size < 1e-3 || (size >= 1e9 && power(size) - place <= LEAD)) return value.toExponential();
  const unit = size < 1e9 ? UNITS.find(({ from }) => size >= from) : undefined;
  return unit && place >= unit.least ? `${Number((value / 10 ** unit.zeros).toPrecision(15))}${unit.letter}` : String(value);
}

/** @param {number} value */
const power = (value) => Math.floor(Math.log10(Math.abs(value)));

/**
 * How far a tick is from those beside it and from zero, which its label has to tell; of a single one nothing.
 * @param {readonly number[]} ticks
 * @param {number} tick one of them
 */
export function stepAt(ticks, tick) {
  const index = ticks.indexOf(tick);
  const others = [ticks[index - 1], ticks[index + 1]].filter((other) => other !== undefined);
  return others.length ? Math.min(...others.map((other) => Math.abs(other - tick)), Math.abs(tick) || Infinity) : undefined;
}

/** The label of a share of one: `12.5 %`. @param {number} value @param {number} [step] */
export const percentLabel = (value, step) => `${tickLabel(Number((value * 100).toPrecision(15)), step && step * 100)}\u202f%`;
