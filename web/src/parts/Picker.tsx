// Fields that find a run or a checkpoint by typing, instead of an id.
import {
  Combobox, ComboboxItem, ComboboxLabel, ComboboxPopover, ComboboxProvider,
} from "@ariakit/react";
import { useState } from "react";
import { useCheckpointChoices, useRunChoices } from "../api/comparing";
import { useRun } from "../api/queries";
import type { Checkpoint } from "../api/types";
import { checkpointWords, figure } from "../format";
import { plain } from "../states";

interface Choice {
  value: string;
  /** What the list shows beside the value. */
  about: string;
}

/** A field with a list of choices. Enter takes the first choice, or a text without any. */
function Picker({ label, value, choices, placeholder, onType, onOpen, pick, isLoading }: {
  label: string;
  value: string;
  choices: Choice[];
  placeholder: string;
  onType: (text: string) => void;
  onOpen: (isOpen: boolean) => void;
  pick: (value: string) => void;
  isLoading: boolean;
}) {
  return (
    <ComboboxProvider value={value} setValue={onType} setOpen={onOpen}>
      <span className="picker">
        <ComboboxLabel>{label}</ComboboxLabel>
        <Combobox placeholder={placeholder} autoComplete="list" autoSelect showOnClick
          showOnKeyPress onKeyDown={(event) => {
            const text = event.currentTarget.value.trim();
            if (event.key === "Enter" && text && choices.length === 0) pick(text);
          }} />
      </span>
      <ComboboxPopover className="picked" gutter={4} aria-busy={isLoading}>
        {choices.map((one) => (
          <ComboboxItem key={one.value} value={one.value} focusOnHover setValueOnClick={false}
            selectValueOnClick={false} onClick={() => pick(one.value)}>
            <span>{one.value}</span> <span className="second">{one.about}</span>
          </ComboboxItem>
        ))}
        {choices.length === 0 ? (
          // A list of options needs one.
          <div role="option" aria-disabled aria-selected={false} className="muted">
            {isLoading ? "Searching…" : "Nothing matches."}
          </div>
        ) : null}
      </ComboboxPopover>
    </ComboboxProvider>
  );
}

/** Finds a run by a part of its name. */
export function RunPicker({ label, value = "", except = [], pick }: {
  label: string;
  value?: string;
  except?: string[];
  pick: (run: string) => void;
}) {
  const [text, setText] = useState(value);
  const [isOpen, setOpen] = useState(false);
  const query = useRunChoices(text === value ? "" : text.trim(), isOpen);
  const choices = (query.data ?? []).filter((one) => !except.includes(one.run))
    .map((one): Choice => ({ value: one.run, about: `${plain(one.state)} · ${one.created_by}` }));
  return (
    <Picker label={label} value={text} choices={choices} placeholder="part of a run's name"
      onType={setText} onOpen={setOpen} isLoading={query.isFetching}
      pick={(run) => {
        setText(value);
        pick(run);
      }} />
  );
}

const nameOf = (id: string): string => id.slice(id.lastIndexOf(":") + 1);

function aboutOf(one: Checkpoint): string {
  const metric = Object.entries(one.metrics)[0];
  return [checkpointWords(one.id), one.is_best ? "best" : null, one.pinned ? "pinned" : null,
    one.state === "committed" ? null : plain(one.state),
    metric ? `${metric[0]} ${figure(metric[1])}` : null].filter(Boolean).join(" · ");
}

/** Finds a checkpoint of a run: the latest, the best, or by its step. */
export function CheckpointPicker({ label, run, value = "", pick }: {
  label: string;
  run: string;
  value?: string;
  pick: (name: string) => void;
}) {
  const [text, setText] = useState(value);
  const [isOpen, setOpen] = useState(false);
  const typed = text === value ? "" : text.trim().toLowerCase();
  const step = /^(?:step[- ]?)?0*(\d{1,15})$/.exec(typed)?.[1];
  const query = useCheckpointChoices(run, step === undefined ? null : Number(step), isOpen);
  const { data: shown } = useRun(run);
  const keep = shown?.spec.checkpoint as { keep?: { best?: { metric?: string } } } | undefined;
  const metric = keep?.keep?.best?.metric;
  const words: Choice[] = [
    { value: "latest", about: "the one that the run would resume from" },
    ...(metric ? [{ value: "best", about: `by ${metric}` }] : []),
  ].filter((one) => one.value.includes(typed));
  const listed = (query.data ?? []).map((one): Choice =>
    ({ value: nameOf(one.id), about: aboutOf(one) }));
  const found = step === undefined
    ? listed.filter((one) => `${one.value} ${one.about}`.toLowerCase().includes(typed))
    : listed;
  return (
    <Picker label={label} value={text} choices={[...words, ...found]}
      placeholder="latest, best or a step" onType={setText} onOpen={setOpen}
      isLoading={query.isFetching}
      pick={(name) => {
        const chosen = /^\d+$/.test(name) ? `step-${name}` : name;
        setText(chosen);
        pick(chosen);
      }} />
  );
}
