// The GPUs of a node over time: a small chart for each quantity, and their newest values.
import { useState } from "react";
import type { GpuSeries, GpuTrack } from "../../api/schema";
import { useGpus } from "../../api/series";
import { bytes, count, exact } from "../../format";
import { Loaded } from "../../parts/basics";
import { lineName, TrackChart } from "../../parts/TrackChart";

type Values = (number | null)[];

type Format = (value: number | null | undefined) => string;

const inUnit = (unit: string): Format => (value) =>
  value == null ? "–" : `${count(value)} ${unit}`;

const TRACKS: [string, (gpu: GpuTrack) => Values, Format][] = [
  ["Utilisation", (gpu) => gpu.utilisation_percent, inUnit("%")],
  ["Memory", (gpu) => gpu.memory_bytes, bytes],
  ["Temperature", (gpu) => gpu.temperature_c, inUnit("°C")],
  ["Power", (gpu) => gpu.power_w, inUnit("W")],
  ["New ECC errors", (gpu) => gpu.ecc_errors, count],
];

const newest = (values: Values) => values.findLast((value) => value !== null);
const total = (values: Values) => values.reduce<number>((sum, value) => sum + (value ?? 0), 0);

/** The Xid errors of all GPUs in order of time, as (GPU, code, Unix seconds). */
export function xidsOf({ gpus, start_s, bucket_s }: GpuSeries): [number, number, number][] {
  return gpus
    .flatMap((gpu) => gpu.xids.map((code, bucket): [number, number, number] =>
      [gpu.index, code ?? 0, start_s + bucket * bucket_s]))
    .filter(([, code]) => code > 0)
    .sort((a, b) => a[2] - b[2]);
}

function Faults({ series }: { series: GpuSeries }) {
  const xids = xidsOf(series);
  const errors = series.gpus.filter((gpu) => total(gpu.ecc_errors) > 0);
  if (xids.length === 0 && errors.length === 0) {
    return <p className="muted">No Xid errors and no uncorrected ECC errors.</p>;
  }
  return (
    <ul className="gpu-faults">
      {errors.map((gpu) => (
        <li key={gpu.index} className="problem">GPU {gpu.index}: new uncorrected ECC errors</li>
      ))}
      {xids.map(([index, code, at]) => (
        <li key={`${index} ${at}`} className="problem">
          GPU {index}: Xid {code}, {exact(at * 1000)}
        </li>
      ))}
    </ul>
  );
}

function Newest({ gpus }: { gpus: GpuTrack[] }) {
  return (
    <div className="table-wrap" tabIndex={0} role="region" aria-label="Newest values of each GPU">
      <table>
        <thead>
          <tr>
            <th scope="col" className="number">GPU</th>
            {TRACKS.slice(0, 4).map(([name]) => (
              <th key={name} scope="col" className="number">{name}</th>
            ))}
            <th scope="col" className="wide-only">UUID</th>
          </tr>
        </thead>
        <tbody>
          {gpus.map((gpu, place) => (
            <tr key={gpu.index}>
              <td className="number nowrap">
                <span className="swatch" aria-hidden
                  style={{ background: `var(--${lineName(place)})` }} /> {gpu.index}
              </td>
              {TRACKS.slice(0, 4).map(([name, of, format]) => (
                <td key={name} className="number">{format(newest(of(gpu)))}</td>
              ))}
              <td className="wide-only mono">{gpu.uuid}</td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

function Charts({ series }: { series: GpuSeries }) {
  const x = Array.from({ length: series.buckets }, (_, n) => series.start_s + n * series.bucket_s);
  return (
    <div className="tracks">
      {TRACKS.map(([name, of, format]) => {
        const lines = series.gpus.map(of);
        const isEmpty = lines.every((line) => line.every((value) => value === null));
        return (
          <div key={name} className="track">
            <h3>{name}</h3>
            {isEmpty ? <p className="muted">not reported</p> : (
              <TrackChart x={x} lines={lines} label={name} format={format} />
            )}
          </div>
        );
      })}
    </div>
  );
}

export function GpusOverTime({ run, attempt, from, live }: {
  run: string; attempt: number | undefined; from: number | undefined; live: boolean;
}) {
  const [node, setNode] = useState<number | undefined>(undefined);
  const query = useGpus(run, { attempt, node, time_from: from }, live);
  return (
    <section className="section" aria-label="GPUs over time">
      <div className="section-head"><h2>GPUs over time</h2></div>
      <Loaded query={query}>
        {(series) => series.nodes.length === 0 ? (
          <p className="muted">No data of GPUs. It needs an NVIDIA driver and nvidia-ml-py.</p>
        ) : (
          <>
            <div className="toolbar">
              <label>
                Node
                <select
                  value={series.node ?? 0}
                  onChange={(event) => setNode(Number(event.target.value))}
                >
                  {series.nodes.map((one) => (
                    <option key={one.node} value={one.node}>{one.node}: {one.host}</option>
                  ))}
                </select>
              </label>
            </div>
            <Faults series={series} />
            <Charts series={series} />
            <Newest gpus={series.gpus} />
            {series.problems.map((one) => <p key={one} className="problem">{one}</p>)}
          </>
        )}
      </Loaded>
    </section>
  );
}
