/** The API reference: Swagger UI over this service's own OpenAPI document. */

import { sessionHeader } from "../ui/api.js";
import { byId } from "../ui/dom.js";

const { SwaggerUIBundle } = /** @type {any} */ (window);

SwaggerUIBundle({
  url: "/openapi.json",
  domNode: byId("reference"),
  displayRequestDuration: true,
  docExpansion: "list",
  defaultModelsExpandDepth: 0,
  defaultModelExpandDepth: 3,
  filter: true,
  validatorUrl: null,
  /** @param {{headers: Record<string, string>}} request */
  requestInterceptor: (request) => ({ ...request, headers: { ...request.headers, ...sessionHeader() } }),
  showMutatedRequest: false, // the command to copy has no secret of the session
});

/** Swagger UI takes its dark colours from a class of the root. */
const follow = () =>
  document.documentElement.classList.toggle("dark-mode", document.documentElement.dataset.theme === "dark");
document.addEventListener("themechange", follow);
follow();
