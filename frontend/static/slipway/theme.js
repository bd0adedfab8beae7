// Theme: the system's, light, or dark. Kept in a cookie, so that the server renders the choice and nothing flashes.

const ORDER = ["", "light", "dark"];
const NAMES = { "": "follow the system", light: "light", dark: "dark" };

export function startTheme() {
  const button = document.getElementById("theme-toggle");
  if (!button) return;
  const root = document.documentElement;
  const label = () => button.setAttribute("aria-label", `Theme: ${NAMES[root.dataset.theme ?? ""]}`);
  label();
  button.addEventListener("click", () => {
    const next = ORDER[(ORDER.indexOf(root.dataset.theme ?? "") + 1) % ORDER.length];
    if (next) root.dataset.theme = next;
    else delete root.dataset.theme;
    document.cookie = `theme=${next}; path=/; max-age=${next ? 31536000 : 0}; samesite=lax`;
    label();
    document.dispatchEvent(new CustomEvent("slipway:theme"));
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () =>
    document.dispatchEvent(new CustomEvent("slipway:theme")),
  );
}
