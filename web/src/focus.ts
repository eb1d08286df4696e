// The place of the keyboard, when the focused control disappears or is disabled for a while.
import { useEffect } from "react";

const FOCUSABLE = "a[href], button:not(:disabled), input:not(:disabled), select:not(:disabled), "
  + "textarea:not(:disabled), summary, [tabindex='0']";
// So many fields of a dialog may have had the focus after the control that opened it.
const PLACES_MAX = 20;

/** An ancestor of the focused element, and what stood before the part that leads to it. */
interface Level {
  around: Element;
  before: Element | null;
}

function levelsOf(element: Element): Level[] {
  const levels: Level[] = [];
  for (let one = element; one.parentElement; one = one.parentElement) {
    levels.push({ around: one.parentElement, before: one.previousElementSibling });
  }
  return levels;
}

/** Curves and timelines are drawings, and have the focus, too. */
const isFocusable = (one: unknown): one is HTMLElement | SVGElement =>
  one instanceof HTMLElement || one instanceof SVGElement;

const isShown = (one: Element) => one.getClientRects().length > 0;

function focusOn(element: Element) {
  if (!isFocusable(element)) return;
  if (element.tabIndex < 0 && !element.hasAttribute("tabindex")) element.tabIndex = -1;
  element.focus({ preventScroll: true });
}

/** Focuses what is left nearest to a removed control: the control before it, or what was around.
    Returns whether there is anything. */
function focusNear(levels: Level[]): boolean {
  const found = levels.find(({ around }) => around.isConnected);
  if (!found || found.around === document.body) return false;
  const { around, before } = found;
  if (!before?.isConnected) {
    focusOn(around);
    return true;
  }
  const inside = [...before.querySelectorAll<HTMLElement>(FOCUSABLE)].filter(isShown);
  focusOn(before.matches(FOCUSABLE) ? before : inside.at(-1) ?? before);
  return true;
}

interface Place {
  element: Element;
  levels: Level[];
}

/** Keeps the focus near its place for as long as the page is open. */
export function keepFocus(): () => void {
  // The newest is first. A closed dialog leaves nothing, so the places before it are kept, too.
  let places: Place[] = [];
  let disabled: Element | null = null;
  const isLost = () => document.activeElement === null || document.activeElement === document.body;
  const enter = ({ target }: FocusEvent) => {
    if (!isFocusable(target)) return;
    const place = { element: target, levels: levelsOf(target) };
    places = [place, ...places.filter((one) => one.element !== target)].slice(0, PLACES_MAX);
    disabled = null;
  };
  // A click beside all controls takes the focus away on purpose.
  const press = () => {
    places = [];
  };
  const change = () => {
    if (!isLost()) return;
    for (const { element, levels } of places) {
      if (!element.isConnected) {
        if (focusNear(levels)) return;
      } else {
        // Escape takes the focus out of the search on purpose, so only a disabled control gets it
        // back.
        if (element.matches(":disabled")) disabled = element;
        else if (disabled === element) focusOn(element);
        return;
      }
    }
  };
  const watch = new MutationObserver(change);
  watch.observe(document.body, { subtree: true, childList: true, attributeFilter: ["disabled"] });
  document.addEventListener("focusin", enter);
  document.addEventListener("pointerdown", press, true);
  return () => {
    watch.disconnect();
    document.removeEventListener("focusin", enter);
    document.removeEventListener("pointerdown", press, true);
  };
}

export function useKeptFocus() {
  useEffect(keepFocus, []);
}
