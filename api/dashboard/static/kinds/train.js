/** What the page of a training job shows. */

import { Execution } from "../job/execution.js";
import { Figures } from "../job/figures.js";
import { Layout } from "../job/layout.js";
import { Metrics } from "../job/metrics.js";
import { PipelinePlan } from "../job/plan.js";

/** @returns {import("../job/section.js").Section[]} */
export const sections = () => [new Figures(["data_sha256"]), new Metrics(true), new Layout(), new PipelinePlan(), new Execution()];
