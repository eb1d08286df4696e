// The durability of checkpoints: icons for lists and graphs, and the stages of one checkpoint.
import { when } from "../format";
import { lookOf } from "../states";
import { STAGE_WORDS, reachedStages, type Stage } from "../durability";
import type { CheckpointDetail } from "../api/types";
import { Shape, Time } from "./basics";

const LEGEND = ["staged", "durable", "verified", "mirrored", "damaged", "deleted"] as const;

interface StageProps {
  stage: Stage;
  mirrored?: boolean | null | undefined;
}

/** The icon of a stage, and a second one for a copy in the mirror, with a tooltip. */
export function StageIcon({ stage, mirrored: copied }: StageProps) {
  // A deleted checkpoint has no copy either.
  const mirrored = copied && stage !== "deleted";
  const words = mirrored ? `${STAGE_WORDS[stage]}; ${STAGE_WORDS.mirrored}` : STAGE_WORDS[stage];
  return (
    <span className="stage" title={words}>
      <Shape state={stage} />
      {mirrored ? <Shape state="mirrored" /> : null}
    </span>
  );
}

/** The stage as icon and text, for a table's cell. */
export function StageState({ stage, mirrored }: StageProps) {
  return (
    <span className="state">
      <StageIcon stage={stage} mirrored={mirrored ?? null} />
      <span>
        {stage}
        {mirrored && stage !== "deleted" ? <span className="wide-only">, mirrored</span> : null}
      </span>
    </span>
  );
}

export function StageLegend() {
  return (
    <ul className="legend">
      {LEGEND.map((one) => (
        <li key={one} title={STAGE_WORDS[one]} className="state"><Shape state={one} /> {one}</li>
      ))}
    </ul>
  );
}

/** The stages staged, durable, verified and mirrored, with the time when each was reached. */
export function StageLine({ one }: { one: CheckpointDetail }) {
  return (
    <ol className="stages" aria-label="Durability">
      {reachedStages(one, one.has_mirror ?? false).map(({ word, at, note }) => {
        const reached = when(at) !== null || (word === "damaged");
        const [tone] = lookOf(word);
        return (
          <li key={word} className={reached ? `reached tone-edge-${tone}` : undefined}>
            <span className="state">
              {reached ? <Shape state={word} /> : <span className="muted" aria-hidden>–</span>}
              <strong>{word}</strong>
            </span>
            <span className="muted">
              {reached && at ? <Time at={at} /> : reached ? "found by a resume" : "not yet"}
              {note ? ` ${note}` : ""}
            </span>
          </li>
        );
      })}
    </ol>
  );
}
