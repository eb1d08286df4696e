// Whether the window is as narrow as a phone, for what is built differently there.
import { useSyncExternalStore } from "react";

// The width is that of the style sheets.
const query = typeof window.matchMedia === "function"
  ? window.matchMedia("(max-width: 640px)") : null;

function subscribe(change: () => void): () => void {
  query?.addEventListener("change", change);
  return () => query?.removeEventListener("change", change);
}

export const useNarrow = (): boolean =>
  useSyncExternalStore(subscribe, () => query?.matches ?? false);
