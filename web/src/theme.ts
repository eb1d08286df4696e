// The theme: light, dark or the system's. `public/theme.js` applies the choice before first paint.
import { useState } from "react";

export type Theme = "system" | "light" | "dark";
const KEY = "holdfast.theme";

function chosen(): Theme {
  try {
    const value = localStorage.getItem(KEY);
    return value === "light" || value === "dark" ? value : "system";
  } catch {
    return "system";
  }
}

function apply(theme: Theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  try {
    if (theme === "system") localStorage.removeItem(KEY);
    else localStorage.setItem(KEY, theme);
  } catch {
    // Without storage, the choice lasts until the page is closed.
  }
  // Curves are drawn on a canvas, which does not follow the style sheet.
  window.dispatchEvent(new Event("holdfast:theme"));
}

export function useTheme(): [Theme, (theme: Theme) => void] {
  const [theme, setTheme] = useState<Theme>(chosen);
  return [
    theme,
    (next) => {
      setTheme(next);
      apply(next);
    },
  ];
}
