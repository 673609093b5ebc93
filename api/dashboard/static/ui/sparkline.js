/** A curve of a line's height, without axes: how something went, at a glance. */

import { number } from "../lib/format.js";
import { setAttribute } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT, MARGIN] = [64, 18, 1.5];

export class Sparkline {
  constructor() {
    this.element = document.createElementNS(SVG, "svg");
    this.line = document.createElementNS(SVG, "polyline");
    for (const [name, value] of Object.entries({ class: "spark", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, width: WIDTH, height: HEIGHT, role: "img" })) {
      setAttribute(this.element, name, value);
    }
    this.element.append(this.line);
    this.show([]);
  }

  /** @param {readonly number[]} values what is not finite is left out */
  show(values) {
    const finite = values.filter(Number.isFinite);
    setAttribute(this.element, "hidden", finite.length < 2);
    if (finite.length < 2) return;
    const [least, most] = [Math.min(...finite), Math.max(...finite)];
    const up = (/** @type {number} */ value) => HEIGHT - MARGIN - ((value - least) / (most - least || 1)) * (HEIGHT - 2 * MARGIN);
    const points = finite.map((value, index) => `${((index / (finite.length - 1)) * WIDTH).toFixed(1)},${up(value).toFixed(1)}`);
    setAttribute(this.line, "points", points.join(" "));
    setAttribute(this.element, "aria-label", `from ${number(finite[0])} to ${number(finite.at(-1))}`);
  }
}
