// The filters of the list of runs. They stand in the address, and the server applies them.
import { useNavigate, useSearch } from "@tanstack/react-router";
import { useEffect, useRef, useState } from "react";
import { BASE, withQuery } from "../api/client";
import { useFilterValues, type Sort } from "../api/queries";
import { PREFIX } from "../prefix";
import type { RunsSearch } from "../runsSearch";
import { plain } from "../states";
import { SavedViews } from "./SavedViews";

const STATES = ["running", "queued", "waiting", "paused", "completed", "failed", "cancelled"];
const TYPING_MS = 250;
const HOUR_S = 3600;
/** The times since which runs were submitted, by their word in the address. */
const TIMES: Record<string, [string, number]> = {
  hour: ["the last hour", HOUR_S],
  day: ["the last day", 24 * HOUR_S],
  week: ["the last 7 days", 7 * 24 * HOUR_S],
  month: ["the last 30 days", 30 * 24 * HOUR_S],
};

const FOLDED = ["user", "cause", "partition", "account", "tag", "since", "attention"] as const;
type Given = Pick<RunsSearch, "search" | "state" | (typeof FOLDED)[number]>;

/** The server's parameters for a filter in the address. */
export function filterOf({ since, ...given }: Given) {
  const { search, state, user, cause, partition, account, tag, attention } = given;
  const created_within = since === undefined ? undefined : TIMES[since]?.[1];
  return { search, state, user, cause, partition, account, tag, attention, created_within };
}

/** The choices for the time since which runs were submitted. */
export const SINCE = Object.entries(TIMES).map(([one, [words]]): [string, string] => [one, words]);

export const isFiltered = (given: Given): boolean =>
  Boolean(given.search || given.state || FOLDED.some((name) => given[name]));

function SearchBox() {
  const { search = "", focus } = useSearch({ from: "/" });
  const navigate = useNavigate({ from: "/" });
  const box = useRef<HTMLInputElement>(null);
  const timer = useRef<number | undefined>(undefined);
  useEffect(() => {
    if (focus === "search") box.current?.focus();
  }, [focus]);
  // Follow the address, unless the user is typing.
  useEffect(() => {
    if (box.current && timer.current === undefined) box.current.value = search;
  }, [search]);
  useEffect(() => () => clearTimeout(timer.current), []);
  const type = (words: string) => {
    clearTimeout(timer.current);
    timer.current = window.setTimeout(() => {
      timer.current = undefined;
      // The user may have left this page meanwhile.
      if (window.location.pathname !== `${PREFIX}/`) return;
      void navigate({ search: (old) => ({ ...old, search: words || undefined }), replace: true });
    }, TYPING_MS);
  };
  return (
    <input
      ref={box}
      type="search"
      aria-label="Search runs by name"
      placeholder="Search by name ( / )"
      defaultValue={search}
      onChange={(event) => type(event.target.value)}
      onKeyDown={(event) => {
        if (event.key !== "Escape") return;
        // Keep the search text, and let the list receive the keys.
        event.preventDefault();
        event.currentTarget.blur();
      }}
    />
  );
}

type Named = "state" | Exclude<(typeof FOLDED)[number], "attention">;

/** A choice that stands in the address of the list of runs. */
function Choice({ name, ...rest }: { name: Named; label: string; values: [string, string][] }) {
  const { [name]: value } = useSearch({ from: "/" });
  const navigate = useNavigate({ from: "/" });
  return (
    <Pick {...rest} value={value}
      pick={(next) => void navigate({ search: (old) => ({ ...old, [name]: next }) })} />
  );
}

export function Pick({ label, values, value = "", usual = "all", pick }: {
  label: string;
  /** The word for no choice. */
  usual?: string;
  values: [string, string][];
  value: string | undefined;
  pick: (value: string | undefined) => void;
}) {
  // A value of the address that no run has now must not look like no filter.
  const known = value === "" || values.some(([one]) => one === value);
  return (
    <label>
      {label}
      <select value={value} onChange={(event) => pick(event.target.value || undefined)}>
        <option value="">{usual}</option>
        {known ? null : <option value={value}>{value}</option>}
        {values.map(([one, words]) => <option key={one} value={one}>{words}</option>)}
      </select>
    </label>
  );
}

export const pairs = (
  values: string[] | undefined,
  words = (one: string) => one,
): [string, string][] =>
  (values ?? []).map((one) => [one, words(one)]);

function More() {
  const given = useSearch({ from: "/" });
  const navigate = useNavigate({ from: "/" });
  const set = FOLDED.filter((name) => given[name]).length;
  const [isOpen, setOpen] = useState(false);
  // The values cost the server a look at every run, and few visits need them.
  const values = useFilterValues(isOpen || set > 0).data;
  return (
    <details className="more-filters" open={set > 0 || undefined}
      onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>{set > 0 ? `Filters (${set})` : "Filters"}</summary>
      <div className="toolbar">
        <Choice name="user" label="User" values={pairs(values?.users)} />
        <Choice name="cause" label="Last cause" values={pairs(values?.causes, plain)} />
        <Choice name="partition" label="Partition" values={pairs(values?.partitions)} />
        <Choice name="account" label="Account" values={pairs(values?.accounts)} />
        <Choice name="tag" label="Tag" values={pairs(values?.tags)} />
        <Choice name="since" label="Submitted in" values={SINCE} />
        <label>
          <input
            type="checkbox"
            checked={Boolean(given.attention)}
            onChange={(event) => void navigate({
              search: (old) => ({ ...old, attention: event.target.checked || undefined }),
            })}
          />
          Needs attention
        </label>
      </div>
    </details>
  );
}

function Download({ where }: { where: Parameters<typeof withQuery>[1] }) {
  const link = (format: string) => `${BASE}${withQuery("/tables/runs", { ...where, format })}`;
  return (
    <span className="download">
      <a href={link("csv")} download>CSV</a> <a href={link("json")} download>JSON</a>
    </span>
  );
}

export function RunFilters({ where, order }: {
  where: ReturnType<typeof filterOf>;
  order: Sort;
}) {
  return (
    <div className="toolbar" role="search">
      <SearchBox />
      <Choice name="state" label="State" values={pairs(STATES)} />
      <More />
      <SavedViews />
      <Download where={{ ...where, ...order }} />
    </div>
  );
}
