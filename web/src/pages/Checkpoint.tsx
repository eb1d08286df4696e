// One checkpoint: its facts, its files, its ancestry, and the commands that use it.
import { Link, useParams } from "@tanstack/react-router";
import { Fragment, useState } from "react";
import { useMayAct } from "../api/session";
import { useAncestry, useCheckpoint } from "../api/queries";
import type { Ancestor, CheckpointDetail } from "../api/types";
import { Export } from "../parts/Export";
import { Verify } from "../parts/Verify";
import { bytes, checkpointWords, count, figure, runOf, span } from "../format";
import { ActionButton, type Action } from "../parts/Confirm";
import { Copy, Empty, Facts, Loaded, Time, useTitle } from "../parts/basics";
import { StageLine, StageState } from "../parts/Durability";
import { stageOfCheckpoint } from "../durability";
import { AnnotateButton, CheckpointTags, Note } from "../parts/Tags";
import { plain } from "../states";

const FILES_SHOWN = 200;
const ANCESTORS_SHOWN = 20;
const MORE = 200;

function actionsOf(one: CheckpointDetail): Action[] {
  const base = `/checkpoints/${encodeURIComponent(one.id)}`;
  const there = one.state !== "deleted";
  return [
    one.pinned
      ? { id: "pin", word: "Unpin", title: "Unpin this checkpoint", path: `${base}/unpin`,
          explanation: <p>After that, only the keep rules decide whether it is kept.</p> }
      : { id: "pin", word: "Pin", title: "Pin this checkpoint", path: `${base}/pin`,
          disabled: there ? null : "The checkpoint was deleted.",
          field: { name: "note", label: "Reason (optional)", type: "text", initial: "" },
          explanation: <p>A pinned checkpoint is kept regardless of the keep rules.</p> },
    { word: "Fork", title: "Start a new run from this checkpoint", path: `${base}/fork`,
      disabled: there ? null : "The checkpoint was deleted.",
      field: { name: "name", label: "Name of the new run", type: "text", required: true,
        initial: `${runOf(one.id)}-fork` },
      explanation: <p>The new run has the same spec and starts from this state.</p>,
      done: (answer) => typeof answer.run === "string" ? (
        <>Started <Link to="/runs/$run" params={{ run: answer.run }}>{answer.run}</Link>.</>
      ) : null },
  ];
}

/** The pin of a checkpoint: by whom, when and why. */
function Pin({ one }: { one: CheckpointDetail }) {
  return (
    <span className="whole">
      {one.pin_note ? `${one.pin_note} — ` : ""}
      {one.pinned_by ?? "unknown"}, <Time at={one.pinned_at} />
    </span>
  );
}

function AncestorLine({ one, of: id }: { one: Ancestor; of: string }) {
  return (
    <li>
      {one.id === id ? <strong>{checkpointWords(one.id)}</strong> : (
        <Link to="/checkpoints/$id" params={{ id: one.id }}>{checkpointWords(one.id)}</Link>
      )}{" "}
      <span className="muted">
        {one.run} · {one.world_size ?? "?"} ranks · {plain(one.state)}
      </span>
      {one.id === id ? null : (
        <>
          {" · "}
          <Link to="/compare" search={{ a: one.id, b: id }}>compare</Link>
        </>
      )}
    </li>
  );
}

function Ancestry({ id }: { id: string }) {
  const query = useAncestry(id);
  const [shown, setShown] = useState(ANCESTORS_SHOWN);
  return (
    <Loaded query={query}>
      {(chain) => (
        <>
          <ol>
            {chain.slice(0, shown).map((one) => <AncestorLine key={one.id} one={one} of={id} />)}
          </ol>
          {chain.length > shown ? (
            <button type="button" onClick={() => setShown(shown + MORE)}>
              Show more of {count(chain.length)}
            </button>
          ) : null}
        </>
      )}
    </Loaded>
  );
}

function Files({ one }: { one: CheckpointDetail }) {
  const files = one.manifest_files ?? [];
  if (files.length === 0) {
    return <Empty title="No files to show"><p>The manifest cannot be read.</p></Empty>;
  }
  return (
    <div className="table-wrap" tabIndex={0} role="region" aria-label="Files">
      <table>
        <thead>
          <tr>
            <th scope="col">File</th>
            <th scope="col" className="number">Size</th>
            <th scope="col" className="wide-only">Checksum</th>
          </tr>
        </thead>
        <tbody>
          {files.slice(0, FILES_SHOWN).map((file) => (
            <tr key={file.path}>
              <td className="mono">{file.path}</td>
              <td className="number">{bytes(file.bytes)}</td>
              <td className="mono wide-only">{file.checksum}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {files.length > FILES_SHOWN ? (
        <p className="muted">and {count(files.length - FILES_SHOWN)} more</p>
      ) : null}
    </div>
  );
}

/** The programs that used this checkpoint, and what they reported. */
function Consumers({ one }: { one: CheckpointDetail }) {
  return (
    <section className="section">
      <h2>Consumers</h2>
      <div className="table-wrap" tabIndex={0} role="region" aria-label="Consumers">
        <table>
          <thead>
            <tr>
              <th scope="col">Consumer</th>
              <th scope="col">State</th>
              <th scope="col">Metrics</th>
              <th scope="col" className="number wide-only">Tries</th>
              <th scope="col" className="wide-only">Log</th>
            </tr>
          </thead>
          <tbody>
            {one.consumers.map((use) => (
              <tr key={use.name}>
                <td>{use.name}<div className="second">on {use.event}</div></td>
                <td>
                  {plain(use.state)}, <Time at={use.changed_at} />
                  {use.reason ? <div className="second">{use.reason}</div> : null}
                </td>
                <td>
                  {Object.entries(use.metrics).map(([name, value]) => (
                    <div key={name}>
                      {name} {typeof value === "number" ? figure(value) : value}
                    </div>
                  ))}
                </td>
                <td className="number wide-only">{use.tries}</td>
                <td className="mono wide-only">{use.log}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </section>
  );
}

function Body({ one, mayAct }: { one: CheckpointDetail; mayAct: boolean }) {
  const commands = Object.entries(one.commands ?? {});
  const metrics = Object.entries(one.metrics);
  return (
    <>
      <Note of={one} />
      <StageLine one={one} />
      <Facts
        facts={[
          ["Retention", <span className="whole">{one.reason}</span>],
          ["Pinned", one.pinned ? <Pin one={one} /> : null],
          ["Trigger", one.saved_for ? plain(one.saved_for) : null],
          ["Attempt", `${one.attempt}, launch ${one.launch}`],
          ["Ranks", count(one.world_size)],
          ["Size", bytes(one.bytes)],
          ["Files", count(one.files)],
          ["Blocked training", span(one.blocked_s)],
          ["Flush", span(one.flush_s)],
          ["Deleted", one.deleted_at ? <Time at={one.deleted_at} /> : null],
          ["Mirror", one.mirror],
          ...metrics.map(([name, value]): [string, string] => [plain(name), figure(value)]),
          ["Checksum", one.checksum ? <code>{one.checksum}</code> : null],
        ]}
      />
      {one.consumers.length > 0 ? <Consumers one={one} /> : null}
      {commands.length > 0 ? (
        <section className="section">
          <h2>Use this checkpoint</h2>
          <div className="commands">
            {commands.map(([name, command]) => (
              <Fragment key={name}>
                <h3>{plain(name)}</h3>
                <Copy text={command} label={plain(name)} />
              </Fragment>
            ))}
          </div>
        </section>
      ) : null}
      {mayAct && one.on_disk ? (
        <section className="section"><h2>Export</h2><Export id={one.id} /></section>
      ) : null}
      <div className="halves">
        <section className="section"><h2>Ancestry</h2><Ancestry id={one.id} /></section>
        <section className="section"><h2>Files</h2><Files one={one} /></section>
      </div>
    </>
  );
}

export function CheckpointPage() {
  const { id } = useParams({ from: "/checkpoints/$id" });
  useTitle(checkpointWords(id));
  const mayAct = useMayAct();
  const query = useCheckpoint(id);
  const run = runOf(id);
  return (
    <>
      <p className="crumbs">
        <Link to="/">Runs</Link> / <Link to="/runs/$run" params={{ run }}>{run}</Link> /{" "}
        <Link to="/runs/$run/checkpoints" params={{ run }}>checkpoints</Link>
      </p>
      <Loaded query={query}>
        {(one) => (
          <>
            <div className="head">
              <h1>{checkpointWords(one.id)}</h1>
              <StageState stage={stageOfCheckpoint(one)} mirrored={Boolean(one.mirrored_at)} />
              {one.pinned ? <span>pinned</span> : null}
              {one.rolled_back ? <span className="muted">rolled back</span> : null}
              <CheckpointTags tags={one.tags} />
              <div className="actions">
                {mayAct && one.state !== "deleted" ? (
                  <AnnotateButton name={checkpointWords(one.id)} of={one}
                    path={`/checkpoints/${encodeURIComponent(one.id)}`} />
                ) : null}
                {mayAct && one.state !== "deleted" ? <Verify id={one.id} /> : null}
                {mayAct ? actionsOf(one).map((action) => (
                  <ActionButton key={action.id ?? action.word} action={action} />
                )) : null}
                <Link to="/runs/$run/lineage" params={{ run }} search={{ at: id }}>
                  Show in lineage
                </Link>
              </div>
            </div>
            <Body one={one} mayAct={mayAct} />
          </>
        )}
      </Loaded>
    </>
  );
}
