// A heat map of an attempt's ranks over time, and the ranks that keep the others waiting.
import { memo, useCallback, useMemo, useState } from "react";
import { useParams } from "@tanstack/react-router";
import { useRun } from "../../api/queries";
import type { HeatMap, HeatValue, RankMeans } from "../../api/schema";
import { useHeatMap } from "../../api/series";
import { count, exact, percent, span } from "../../format";
import { cellsOf, hostOf, levelAt, scaleOf, valueOf, type Cursor } from "../../heat";
import { Empty, Loaded } from "../../parts/basics";
import { HeatCanvas } from "../../parts/HeatCanvas";
import { isLive } from "../../states";
import { GpusOverTime } from "./GpusOverTime";
import "../../styles/heat.css";

const VALUES: [HeatValue, string][] = [
  ["step", "Step time"],
  ["own", "Own work"],
  ["data", "Wait for data"],
  ["others", "Wait for others"],
];
const RANGES: [string, number | null][] = [
  ["Whole attempt", null],
  ["Last hour", 3600],
  ["Last 6 hours", 6 * 3600],
  ["Last day", 86_400],
];
const ZOOMS = [1, 4, 16, 64];
const NAMED_MAX = 3;

/** The names of the slowest ranks in a sentence. */
const Stragglers = memo(function Stragglers({ worst }: { worst: RankMeans[] }) {
  const found = worst.filter((one) => one.is_straggler);
  if (found.length === 0) {
    return <p className="muted">No rank was much slower than its peers.</p>;
  }
  const more = found.length > NAMED_MAX ? `, and ${count(found.length - NAMED_MAX)} more` : "";
  return (
    <p>
      <strong>{found.length === 1 ? "Straggler" : "Stragglers"}:</strong>{" "}
      {found.slice(0, NAMED_MAX).map((one) =>
        `rank ${one.rank} on ${one.host} (${percent(one.slow_share)} of the time)`).join(", ")}
      {more}. The others wait for {found.length === 1 ? "it" : "them"} in each step.
    </p>
  );
});

const Worst = memo(function Worst({ worst, onChoose }: {
  worst: RankMeans[]; onChoose: (rank: number) => void;
}) {
  return (
    <div className="table-wrap" tabIndex={0} role="region" aria-label="Slowest ranks">
      <table>
        <thead>
          <tr>
            <th scope="col" className="number">Rank</th>
            <th scope="col">Host</th>
            <th scope="col" className="number">Slow for</th>
            <th scope="col" className="number">Own work</th>
            <th scope="col" className="number wide-only">Step</th>
            <th scope="col" className="number">Wait for data</th>
            <th scope="col" className="number wide-only">Wait for others</th>
          </tr>
        </thead>
        <tbody>
          {worst.map((one) => (
            <tr key={one.rank}>
              <td className="number">
                <button type="button" className="plain" onClick={() => onChoose(one.rank)}>
                  <span className="visually-hidden">Show rank </span>{one.rank}
                </button>
              </td>
              <td>{one.host}</td>
              <td className="number">{one.slow_share > 0 ? percent(one.slow_share) : "–"}</td>
              <td className="number">{span(one.own_s)}</td>
              <td className="number wide-only">{span(one.step_s)}</td>
              <td className="number">{span(one.data_s)}</td>
              <td className="number wide-only">{span(one.others_s)}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
});

/** What is at the cursor, or how to move it. */
function Reading({ map, cursor, level, word }: {
  map: HeatMap; cursor: Cursor | null; level: number; word: string;
}) {
  if (!cursor) {
    return (
      <output className="heat-read muted">
        Point at a cell, or focus the map and use the arrow keys.
      </output>
    );
  }
  const rank = map.first_rank + cursor.row;
  const value = valueOf(map, level);
  const time = exact(1000 * (map.start_s + cursor.bucket * map.bucket_s));
  return (
    <output className="heat-read">
      <strong>Rank {rank}</strong> on {hostOf(map.hosts, rank)?.host ?? "no node"} ·{" "}
      {value === null ? "no step" : `${word.toLowerCase()} ${span(value)}`} · {time}
    </output>
  );
}

function HeatView({ map }: { map: HeatMap }) {
  // Until another value has been loaded, the map shows the former one.
  const word = VALUES.find(([each]) => each === map.value)?.[1] ?? "";
  const [cursor, setCursor] = useState<Cursor | null>(null);
  const [zoom, setZoom] = useState(1);
  const cells = useMemo(() => cellsOf(map), [map]);
  const scale = useMemo(() => scaleOf(cells), [cells]);
  const zooms = ZOOMS.filter((each) => each === 1 || each * 8 <= cells.ranks);
  const end = map.start_s + map.buckets * map.bucket_s;
  const began = map.launches.slice(1).map(({ launch, start_s }) =>
    ({ launch, bucket: (start_s - map.start_s) / map.bucket_s }));
  // The cursor moves many times a second, and only the map and its reading follow it.
  const choose = useCallback((rank: number) =>
    setCursor((before) =>
      ({ row: rank - map.first_rank, bucket: before?.bucket ?? map.buckets - 1 })), [map]);
  // After a reload there may be fewer cells.
  const shown = cursor && cursor.row < cells.ranks && cursor.bucket < cells.buckets ? cursor : null;
  return (
    <>
      <div className="toolbar">
        {zooms.length > 1 ? (
          <label>
            Zoom
            <select value={zoom} onChange={(event) => setZoom(Number(event.target.value))}>
              {zooms.map((each) => (
                <option key={each} value={each}>
                  {each === 1 ? `all ${count(cells.ranks)} ranks` : `${each} ×`}
                </option>
              ))}
            </select>
          </label>
        ) : null}
        <span className="heat-scale">
          {span(valueOf(map, scale.low))} <span aria-hidden /> {span(valueOf(map, scale.high))}
        </span>
        <span className="muted">
          from rank {map.first_rank} at the top to {map.first_rank + cells.ranks - 1}
        </span>
      </div>
      <HeatCanvas
        cells={cells} scale={scale} zoom={zooms.includes(zoom) ? zoom : 1} cursor={shown}
        onCursor={setCursor} began={began}
        label={`${word} of ${count(cells.ranks)} ranks over time. The arrow keys move the cursor.`}
      />
      <div className="heat-ends">
        <span>{exact(map.start_s * 1000)}</span>
        <span>{exact(end * 1000)}</span>
      </div>
      <Reading map={map} cursor={shown} level={shown ? levelAt(cells, shown) : 0} word={word} />
      {began.length > 0 ? (
        <p className="muted">The dashed lines are the starts of launches {
          began.map(({ launch }) => launch).join(", ")}.</p>
      ) : null}
      <Stragglers worst={map.worst} />
      <Worst worst={map.worst} onChoose={choose} />
    </>
  );
}

export function RanksOverTime() {
  const { run: name } = useParams({ from: "/runs/$run" });
  const run = useRun(name).data;
  const [value, setValue] = useState<HeatValue>("step");
  const [range, setRange] = useState(0);
  const [attempt, setAttempt] = useState<number | undefined>(undefined);
  const live = isLive(run?.state ?? "");
  const whole = useHeatMap(name, { value, attempt }, live);
  const seconds = RANGES[range]?.[1] ?? null;
  const end = whole.data ? whole.data.start_s + whole.data.buckets * whole.data.bucket_s : null;
  // Whole minutes, so that a live attempt does not ask for another range at each reload.
  const from = seconds === null || end === null ? undefined : Math.floor(end / 60) * 60 - seconds;
  const part = useHeatMap(name, { value, attempt, time_from: from }, live);
  const query = from === undefined ? whole : part;
  const attempts = run?.attempts ?? [];
  return (
    <>
      <section className="section" aria-label="Ranks over time">
        <div className="section-head"><h2>Ranks over time</h2></div>
        <div className="toolbar">
          <label>
            Show
            <select value={value} onChange={(event) => setValue(event.target.value as HeatValue)}>
              {VALUES.map(([each, text]) => <option key={each} value={each}>{text}</option>)}
            </select>
          </label>
          <label>
            Time
            <select value={range} onChange={(event) => setRange(Number(event.target.value))}>
              {RANGES.map(([text], index) => <option key={text} value={index}>{text}</option>)}
            </select>
          </label>
          {attempts.length > 1 ? (
            <label>
              Attempt
              <select
                value={attempt ?? attempts.at(-1)?.number}
                onChange={(event) => setAttempt(Number(event.target.value))}
              >
                {attempts.map(({ number }) => (
                  <option key={number} value={number}>{number}</option>
                ))}
              </select>
            </label>
          ) : null}
        </div>
        <Loaded query={query}>
          {(map) => map.buckets === 0 || map.rows.length === 0 ? (
            <Empty title="No steps recorded yet">
              <p>The agent of each node records them every few seconds while ranks train.</p>
            </Empty>
          ) : <HeatView map={map} />}
        </Loaded>
        {query.data?.problems.map((one) => <p key={one} className="problem">{one}</p>)}
      </section>
      <GpusOverTime run={name} attempt={attempt} from={from} live={live} />
    </>
  );
}
