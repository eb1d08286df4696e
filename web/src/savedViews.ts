// Saved views: the filters and the order of the list of runs, by a name. The browser keeps them,
// and an address brings one to another browser.
import { useSyncExternalStore } from "react";
import { PREFIX } from "./prefix";
import { readRunsSearch, type RunsSearch } from "./runsSearch";

export interface SavedView {
  name: string;
  search: RunsSearch;
}

// Two servers behind one proxy have one storage.
const KEY = `holdfast.views${PREFIX}`;
export const VIEWS_MAX = 50;
export const NAME_MAX = 80;

/** The part of an address that a view has: neither where the focus is nor how a log-in failed. */
export function viewOf(given: RunsSearch): RunsSearch {
  const kept = { ...readRunsSearch({ ...given }), focus: undefined, refused: undefined };
  return Object.fromEntries(Object.entries(kept).filter(([, value]) => value !== undefined));
}

const keyOf = (search: RunsSearch): string => JSON.stringify(viewOf(search));

/** Whether two addresses show the same. */
export const isSame = (one: RunsSearch, other: RunsSearch): boolean => keyOf(one) === keyOf(other);

function read(content: string | null): SavedView[] {
  let given: unknown;
  try {
    given = JSON.parse(content ?? "[]");
  } catch {
    return [];
  }
  if (!Array.isArray(given)) return [];
  const found = new Map<string, SavedView>();
  for (const one of given as unknown[]) {
    const { name, search } = (one ?? {}) as Partial<Record<keyof SavedView, unknown>>;
    if (typeof name !== "string" || typeof search !== "object" || search === null) continue;
    const short = name.trim().slice(0, NAME_MAX);
    if (short) found.set(short, { name: short, search: viewOf(search) });
  }
  return [...found.values()].slice(0, VIEWS_MAX);
}

let known: { content: string | null; views: SavedView[] } = { content: null, views: [] };
const listeners = new Set<() => void>();

function stored(): string | null {
  try {
    return localStorage.getItem(KEY);
  } catch {
    // The browser forbids storage.
    return null;
  }
}

/** The saved views now, which another tab may have changed. */
export function savedViews(): SavedView[] {
  const content = stored();
  if (content !== known.content) known = { content, views: read(content) };
  return known.views;
}

function subscribe(listener: () => void): () => void {
  listeners.add(listener);
  window.addEventListener("storage", listener);
  return () => {
    listeners.delete(listener);
    window.removeEventListener("storage", listener);
  };
}

export const useSavedViews = (): SavedView[] => useSyncExternalStore(subscribe, savedViews);

/** Changes the newest views, and returns false if the browser does not keep them. */
export function changeViews(change: (views: SavedView[]) => SavedView[]): boolean {
  const views = change(savedViews()).sort((one, other) => one.name.localeCompare(other.name));
  try {
    localStorage.setItem(KEY, JSON.stringify(views));
  } catch {
    return false;
  }
  for (const listener of listeners) listener();
  return true;
}

/** The views with this one, which replaces that of the same name. */
export const withView = (views: SavedView[], one: SavedView): SavedView[] =>
  [...views.filter(({ name }) => name !== one.name), one];

export const withoutView = (views: SavedView[], name: string): SavedView[] =>
  views.filter((one) => one.name !== name);
