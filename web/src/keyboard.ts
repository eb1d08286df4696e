// Keys: `/` searches, `g` and a letter open a page, j and k select a row, Enter opens it, ? helps.
import { useEffect, useLayoutEffect, useRef } from "react";

export const GO: Record<string, [string, string]> = {
  r: ["/", "Runs"],
  q: ["/queue", "Queue"],
  n: ["/nodes", "Nodes"],
  s: ["/storage", "Storage"],
  c: ["/goodput", "Goodput and cost"],
};
const CHORD_MS = 2500;
const STORED = "holdfast.keys";
let isOff = false;
try {
  isOff = localStorage.getItem(STORED) === "off";
} catch {
  // Without storage, the keys are on.
}

/** Whether single keys do something. */
export const areKeysOn = (): boolean => !isOff;

/** Turns the single keys on or off in this browser. */
export function setKeys(on: boolean) {
  isOff = !on;
  try {
    if (on) localStorage.removeItem(STORED);
    else localStorage.setItem(STORED, "off");
  } catch {
    // The choice then lasts until the page is closed.
  }
}

const isTyping = (target: EventTarget | null): boolean =>
  target instanceof HTMLElement &&
  (target.isContentEditable || ["INPUT", "TEXTAREA", "SELECT"].includes(target.tagName));

/** Whether a key belongs to something else: a field, a dialog, or the browser. */
const isTaken = (event: KeyboardEvent): boolean =>
  hasModifier(event) || isTyping(event.target) || document.querySelector("[role=dialog]") !== null;

const hasModifier = (event: KeyboardEvent) => event.ctrlKey || event.metaKey || event.altKey;

type Go = (path: string, search?: Record<string, string>) => void;

/** Whether the element handles Enter itself. */
const isOwn = (target: EventTarget | null): boolean =>
  target instanceof HTMLElement && target.closest("a, button, summary, [role=dialog]") !== null;

/** The keys of every page. */
export function useKeys(go: Go, help: () => void) {
  // The page may be rendered between the two keys of a chord, so the first one is kept here.
  const now = useRef({ go, help, armed: 0 });
  useLayoutEffect(() => {
    now.current = { ...now.current, go, help };
  });
  useEffect(() => {
    const press = (event: KeyboardEvent) => {
      const { go, help, armed } = now.current;
      if (isOff || isTaken(event)) return;
      const target = GO[event.key];
      if (Date.now() - armed < CHORD_MS && target) {
        now.current.armed = 0;
        event.preventDefault();
        go(target[0]);
      } else if (event.key === "g") now.current.armed = Date.now();
      else if (event.key === "?") help();
      else if (event.key === "/") focusSearch(event, go);
    };
    window.addEventListener("keydown", press);
    return () => window.removeEventListener("keydown", press);
  }, []);
}

function focusSearch(event: KeyboardEvent, go: Go) {
  event.preventDefault();
  const box = document.querySelector<HTMLInputElement>("input[type=search]");
  if (box) box.focus();
  else go("/", { focus: "search" });
}

/** The keys j, k and Enter for `count` rows. `at` is the selected one. */
export function useListKeys(
  count: number,
  at: number,
  select: (index: number) => void,
  open: (index: number) => void,
) {
  // Keys may be faster than rendering, so each key updates the selection here.
  const now = useRef({ count, at, select, open });
  useLayoutEffect(() => {
    now.current = { count, at, select, open };
  });
  useEffect(() => {
    const press = (event: KeyboardEvent) => {
      const { count, at, select, open } = now.current;
      if (isTaken(event) || count === 0) return;
      if (!isOff && (event.key === "j" || event.key === "k")) {
        const next = event.key === "j" ? Math.min(count - 1, at + 1) : Math.max(0, at - 1);
        now.current.at = next;
        select(next);
      } else if (event.key === "Enter" && at >= 0 && !isOwn(event.target)) open(at);
    };
    window.addEventListener("keydown", press);
    return () => window.removeEventListener("keydown", press);
  }, []);
}

interface Place {
  x: number;
  y: number;
}

const WAYS: Record<string, readonly [number, number]> = {
  ArrowUp: [0, -1], ArrowDown: [0, 1], ArrowLeft: [-1, 0], ArrowRight: [1, 0],
};
// A card that is ahead is nearer than one that is as far to the side.
const SIDE_WEIGHT = 3;

/** The card to which an arrow key leads: the nearest in its direction; undefined if none is. */
export function cardTowards(
  places: ReadonlyMap<string, Place>, from: string, key: string,
): string | undefined {
  const [here, way] = [places.get(from), WAYS[key]];
  if (!here || !way) return undefined;
  const [right, down] = way;
  let nearest: string | undefined;
  let least = Number.POSITIVE_INFINITY;
  for (const [id, { x, y }] of places) {
    const [dx, dy] = [x - here.x, y - here.y];
    const ahead = dx * right + dy * down;
    const far = ahead + SIDE_WEIGHT * Math.abs(dx * down + dy * right);
    if (ahead > 0 && far < least) [nearest, least] = [id, far];
  }
  return nearest;
}
