// Views that are loaded when they are opened. If loading fails, the page stays open.
import { useEffect, useReducer, useState, type FunctionComponent } from "react";
import { AwayError, probe } from "./api/client";
import { useConnection } from "./api/live";
import { Problem } from "./parts/basics";

type Load = () => Promise<Record<string, unknown>>;

const RELOADED = "holdfast:reloaded-at";
const RELOAD_GAP_MS = 60_000;
const preloads: (() => Promise<unknown>)[] = [];

/** Loads every view in the background, so that it opens even without the server. */
export async function preloadViews() {
  for (const load of preloads) await load().catch(() => undefined);
}

/** Reloads the page: if the server responds without the file, it serves a newer build. */
function loadNewBuild(): boolean {
  const last = Number(sessionStorage.getItem(RELOADED) ?? 0);
  if (Date.now() - last < RELOAD_GAP_MS) return false;
  sessionStorage.setItem(RELOADED, String(Date.now()));
  window.location.reload();
  return true;
}

/** A view, and what begins to load it. */
type LazyView = FunctionComponent & { begin: () => void };

/** The component `name` of a module. The router's own wrapper would reload the whole page if the
    server is unreachable, and the browser would show its error page. */
export function lazyView(load: Load, name: string): LazyView {
  let found: FunctionComponent | undefined;
  const bring = async () => {
    found ??= (await load())[name] as FunctionComponent;
  };
  preloads.push(bring);
  function View() {
    const [, redraw] = useReducer((count: number) => count + 1, 0);
    const [tries, retry] = useReducer((count: number) => count + 1, 0);
    const [error, setError] = useState<unknown>(null);
    const { connection } = useConnection();
    const isBack = connection === "live" || connection === "polling";
    useEffect(() => {
      if (found) return undefined;
      let isCurrent = true;
      bring().then(
        () => isCurrent && redraw(),
        async (reason: unknown) => {
          const isReached = await probe();
          if (!isCurrent || (isReached && loadNewBuild())) return;
          setError(isReached ? reason : new AwayError("The server did not respond."));
        },
      );
      return () => {
        isCurrent = false;
      };
    }, [tries, isBack]);
    if (found) {
      const Found = found;
      return <Found />;
    }
    if (!error) return <p className="loading" role="status">Loading…</p>;
    return (
      <>
        <Problem error={error} title="This view could not be loaded." />
        <p><button type="button" onClick={retry}>Retry</button></p>
      </>
    );
  }
  // If this fails, the view itself tries again and says why.
  return Object.assign(View, { begin: () => void bring().catch(() => undefined) });
}
