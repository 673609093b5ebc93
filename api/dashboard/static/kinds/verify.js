/** What the page of a verification job shows. */

import { Cost } from "../job/cost.js";
import { Figures } from "../job/figures.js";
import { Layers } from "../job/layers.js";
import { Layout } from "../job/layout.js";
import { Methods } from "../job/methods.js";
import { Metrics } from "../job/metrics.js";
import { Search } from "../job/search.js";
import { Tree } from "../job/tree.js";
import { Verify } from "../job/verify.js";

/** @returns {import("../job/section.js").Section[]} */
export function sections() {
  const search = new Search();
  const tree = new Tree();
  const instances = new Verify((instance) => {
    search.choose(instance);
    tree.choose(instance);
  });
  return [instances, search, tree, new Methods(), new Figures(["verdicts", "method", "time"]), new Layers(), new Cost(), new Layout(), new Metrics(false)];
}
