// The theme of the page: the system's, light or dark; and its language. Both are remembered in this browser. Not a module, so that it runs before
// the page is painted.
(() => {
  const KEY = "theme";
  const root = document.documentElement;

  // A browser that keeps nothing for this page refuses access to its storage.
  function remembered() {
    try {
      return localStorage.getItem(KEY) ?? "";
    } catch {
      return "";
    }
  }

  function rememberTheme(theme) {
    try {
      localStorage.setItem(KEY, theme);
    } catch {
      // The theme lasts as long as this page.
    }
  }

  function apply(theme) {
    root.dataset.theme = theme;
  }

  apply(remembered());
  document.addEventListener("DOMContentLoaded", () => {
    const choice = document.querySelector("#theme");
    if (!choice) return;
    choice.value = root.dataset.theme;
    choice.addEventListener("change", () => {
      apply(choice.value);
      rememberTheme(choice.value);
    });
  });
  // The language is a cookie, since the server draws most of the page in it.
  const YEAR = 365 * 24 * 3600; // seconds

  function speak(language) {
    document.cookie = `language=${language}; path=/; max-age=${YEAR}; samesite=strict`;
    location.reload();
  }

  document.addEventListener("DOMContentLoaded", () => {
    const choice = document.querySelector("#language");
    choice?.addEventListener("change", () => speak(choice.value));
  });
  // Other tabs of the browser follow.
  addEventListener("storage", ({ key, newValue }) => key === KEY && apply(newValue ?? ""));
})();
