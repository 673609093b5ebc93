/* Runs before the first paint, so that no page flashes. Without a choice the system's theme holds. */
(() => {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");

  const follow = () => {
    const saved = localStorage.getItem("trivet-theme");
    root.dataset.theme = saved === "light" || saved === "dark" ? saved : system.matches ? "dark" : "light";
    document.dispatchEvent(new Event("themechange"));
  };
  follow();
  system.addEventListener("change", follow);

  document.addEventListener("click", (event) => {
    if (!(event.target instanceof Element) || !event.target.closest("#theme")) return;
    localStorage.setItem("trivet-theme", root.dataset.theme === "dark" ? "light" : "dark");
    follow();
  });
})();
