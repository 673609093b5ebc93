/** What the page of a compile check shows. */

import { Compile } from "../job/compile.js";
import { Layout } from "../job/layout.js";

/** @returns {import("../job/section.js").Section[]} */
export const sections = () => [new Compile(), new Layout()];
