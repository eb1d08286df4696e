// Comparison: of runs, with their curves, or of two checkpoints.
import { Link, useSearch } from "@tanstack/react-router";
import { useTitle } from "../parts/basics";
import { CheckpointComparison } from "./compare/Checkpoints";
import { RunComparison } from "./compare/Runs";

// Several addresses belong to one tab, so the page says which one is open.
const EXACT = { exact: true };

export function Compare() {
  const { a, b, what } = useSearch({ from: "/compare" });
  const isOfCheckpoints = what === "checkpoints" || Boolean(a ?? b);
  const title = isOfCheckpoints ? "Compare two checkpoints" : "Compare runs";
  useTitle(title);
  return (
    <>
      <div className="head"><h1>{title}</h1></div>
      <nav className="tabs" aria-label="What is compared">
        <Link to="/compare" search={{}} activeOptions={EXACT}
          aria-current={isOfCheckpoints ? undefined : "page"}>Runs</Link>
        <Link to="/compare" search={{ what: "checkpoints" }} activeOptions={EXACT}
          aria-current={isOfCheckpoints ? "page" : undefined}>Checkpoints</Link>
      </nav>
      {isOfCheckpoints ? <CheckpointComparison /> : <RunComparison />}
    </>
  );
}
