/* Runs before the first paint, so that a chosen theme does not flash. Without a choice the system's one holds. */
(() => {
  const root = document.documentElement;
  const saved = localStorage.getItem("trivet-theme");
  if (saved === "light" || saved === "dark") root.dataset.theme = saved;

  const dark = () =>
    root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;

  document.addEventListener("click", (event) => {
    if (!(event.target instanceof Element) || !event.target.closest("#theme")) return;
    root.dataset.theme = dark() ? "light" : "dark";
    localStorage.setItem("trivet-theme", root.dataset.theme);
    document.dispatchEvent(new Event("themechange"));
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    document.dispatchEvent(new Event("themechange"));
  });
})();
