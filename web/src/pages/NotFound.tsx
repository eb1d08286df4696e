import { Link } from "@tanstack/react-router";
import { Empty, useTitle } from "../parts/basics";

/** The page of an unknown address. */
export function NotFound() {
  useTitle("Page not found");
  return (
    <Empty title="Page not found">
      <p>This address has no page. See <Link to="/">all runs</Link>.</p>
    </Empty>
  );
}
