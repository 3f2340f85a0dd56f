"""Settings of the processes that copy a run's metrics elsewhere. They only read; nothing of the run waits for them."""

import sys
from typing import Annotated, Final, Literal

import msgspec

from runtime.settings.reading.access import Address, Harmless, Program, SecretFile, Writes
from runtime.settings.reading.config import Config
from runtime.settings.tables.values import Positive, Text
from runtime.util.import_path import ROOT

PORT: Final = r"(\d{1,4}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5])"
LOOPBACK: Final = rf"^(127\.0\.0\.1|localhost|\[::1\]):{PORT}$"
EVERY_PORT: Final = r"([1-9]\d{0,3}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5])"
LISTENS: Final = rf"^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9.-]+):{EVERY_PORT}$"
PAGE: Final = "page"  # process that serves the page
PROMETHEUS: Final = "prometheus"  # process that answers /metrics
OPENTELEMETRY: Final = "opentelemetry"  # process that sends spans, and its environment
PAGE_FILE: Final = "page.url"  # in the run directory: its URL with the token


class TrackerConfig(Config, frozen=True, kw_only=True):
    """What all trackers have."""

    # Start this tracker with the run.
    enabled: Address[bool] = False
    # Python interpreter that has the tracker's package. By default that of the environment that `bin/setup --with` made
    # in this checkout, or else the run's own.
    python: Program[Text | None] = None
    # Count all step axes in optimizer steps, as `train/step` is. By default `rollout/step` counts batches.
    always_use_train_step: Harmless[bool] = False


class WandbConfig(TrackerConfig, frozen=True, kw_only=True):
    """Weights & Biases. Its own variables, `WANDB_*`, apply where a key is left out."""

    # Project of the run.
    project: Address[Text | None] = None
    # Team or user that owns the project.
    team: Address[Text | None] = None
    # Group of the run.
    group: Harmless[Text | None] = None
    # Name of the run. By default `run.name`.
    name: Harmless[Text | None] = None
    # Id of the run in W&B. By default `run.name` and the start of this run's own id, which `--fresh` changes.
    run_id: Address[Text | None] = None
    # URL of a W&B server of your own.
    host: Address[Annotated[str, msgspec.Meta(pattern=r"^https?://[^@\s]+$")] | None] = None
    # With "offline" W&B writes directories that `wandb sync` uploads later; with "disabled" nothing is logged.
    mode: Harmless[Literal["online", "offline", "disabled"] | None] = None
    # Directory in which W&B makes its directory `wandb`. By default the run directory.
    dir: Writes[Text | None] = None
    # File that holds the API key. By default W&B takes the variable `WANDB_API_KEY`, or what `wandb login` stored.
    key_file: SecretFile[Text | None] = None


class TensorboardConfig(TrackerConfig, frozen=True, kw_only=True):
    """TensorBoard event files."""

    # Directory in which the run's event files get a directory of their own. By default they are in `tensorboard` in the
    # run directory.
    dir: Writes[Text | None] = None


class MlflowConfig(TrackerConfig, frozen=True, kw_only=True):
    """MLflow. Its own variables, such as `MLFLOW_TRACKING_TOKEN`, apply too."""

    # Where MLflow stores runs: the URL of a server, or `sqlite:///` and a path. By default the variable
    # `MLFLOW_TRACKING_URI`, or else the file `mlflow.db` in the run directory.
    tracking_uri: Address[Annotated[str, msgspec.Meta(pattern=r"^(https?|sqlite)://[^@\s]+$")] | None] = None
    # Experiment of the run. By default the variable `MLFLOW_EXPERIMENT_NAME`, or else "physarum".
    experiment: Address[Text | None] = None
    # Name of the run. By default `run.name`.
    name: Harmless[Text | None] = None


class SwanlabConfig(TrackerConfig, frozen=True, kw_only=True):
    """SwanLab. Its own variables, such as `SWANLAB_API_KEY`, apply too."""

    # Project of the run. By default the variable `SWANLAB_PROJECT`, or else "physarum".
    project: Address[Text | None] = None
    # Workspace that owns the project.
    workspace: Address[Text | None] = None
    # Group of the run.
    group: Harmless[Text | None] = None
    # Name of the run. By default `run.name`.
    name: Harmless[Text | None] = None
    # URL of a SwanLab server of your own.
    host: Address[Annotated[str, msgspec.Meta(pattern=r"^https?://[^@\s]+$")] | None] = None
    # With "offline" SwanLab writes directories that `swanlab sync` uploads later; with "disabled" nothing is logged.
    mode: Harmless[Literal["online", "offline", "disabled"] | None] = None
    # Directory in which the run's directories get a directory of their own. By default they are in `swanlab` in the run
    # directory.
    dir: Writes[Text | None] = None
    # File that holds the API key. By default SwanLab takes the variable, or what `swanlab login` stored.
    key_file: SecretFile[Text | None] = None


class OtlpConfig(Config, frozen=True, kw_only=True):
    """Spans of prompt groups and train steps, by OTLP over HTTP. OpenTelemetry's own variables, `OTEL_*`, apply too."""

    # URL of the collector, such as "http://127.0.0.1:4318"; spans go to `/v1/traces` below it. Unset, none are sent.
    endpoint: Address[Annotated[str, msgspec.Meta(pattern=r"^https?://[^@\s?#]+$")] | None] = None
    # Python interpreter that has OpenTelemetry's packages and those of this project. By default that of the environment
    # that `bin/setup --with opentelemetry` made in this checkout, or else the run's own.
    python: Program[Text | None] = None


class ObserveConfig(Config, frozen=True, kw_only=True):
    """Processes that show the run elsewhere. Their end or hang never ends or slows the run."""

    # Seconds that trackers and the sender of spans get after the end of the run to send the rest. Then they are killed.
    stop_timeout_s: Harmless[Annotated[float, msgspec.Meta(ge=1, le=3600)]] = 30.0
    # Address on which the home node serves the page of the run, such as "127.0.0.1:8765". It is one of this machine
    # alone; port 0 means any free one. Unset, there is no page; `bin/watch RUN --page` serves one at any time.
    page: Address[Annotated[str, msgspec.Meta(pattern=LOOPBACK)] | None] = None
    # Keep the samples of the newest train steps for the page, also after the end of the run: prompts, responses and
    # tokens, as dumps in `samples` in the run directory. Without effect with `run.dump_details`, which keeps all steps.
    # What cannot be written there costs samples, not the run.
    samples: Harmless[bool] = False
    # Number of newest train steps whose samples `samples` keeps. Those of older steps are removed.
    sample_steps: Positive = 20
    # Address on which each node answers `/metrics` for Prometheus, such as "127.0.0.1:9464", or "0.0.0.0:9464" for a
    # Prometheus on another machine. There is no TLS and no password: everybody who reaches the port reads names of
    # processes, counts and metrics, but no prompts, responses or errors. Unset, nothing answers.
    prometheus: Address[Annotated[str, msgspec.Meta(pattern=LISTENS)] | None] = None
    # Add to the dumps, for each token that a train step read, its log-prob by the trainer and the rules that masked or
    # limited it. It needs `run.dump_details`, and adds 12 bytes per token there. The first rank of the trainer writes
    # these files, on its node. Without space, or while the files of the step before are being written, a step has none.
    tokens: Harmless[bool] = False
    otlp: OtlpConfig = OtlpConfig()
    wandb: WandbConfig = WandbConfig()
    tensorboard: TensorboardConfig = TensorboardConfig()
    mlflow: MlflowConfig = MlflowConfig()
    swanlab: SwanlabConfig = SwanlabConfig()

    def trackers(self) -> dict[str, TrackerConfig]:
        """Return the enabled trackers by name."""
        known: dict[str, TrackerConfig] = {
            "wandb": self.wandb,
            "tensorboard": self.tensorboard,
            "mlflow": self.mlflow,
            "swanlab": self.swanlab,
        }
        return {name: tracker for name, tracker in known.items() if tracker.enabled}


def python_of(name: str, python: str | None) -> str:
    """Return the interpreter that runs a tracker on this machine: the set one, or that of its environment, or ours."""
    own = ROOT / f".venv-{name}" / "bin" / "python"
    return python or (str(own) if own.exists() else sys.executable)
