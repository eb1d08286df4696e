import { Link } from "@tanstack/react-router";
import { Empty, useTitle } from "../parts/basics";

/** An address that leads nowhere. */
export function NotFound() {
  useTitle("No such page");
  return (
    <Empty title="There is no such page">
      <p>The address leads nowhere here. <Link to="/">All runs</Link> are a good place to begin.</p>
    </Empty>
  );
}
