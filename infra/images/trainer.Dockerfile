# A training environment with Holdfast: torch, and no Prefect and no SQL.
# Build it in the root of a checkout:
#   docker build -f infra/images/trainer.Dockerfile -t holdfast-trainer .
ARG BASE=python:3.11-slim-bookworm
FROM python:3.11-slim-bookworm AS wheel
COPY . /src
# Without the page, which jobs do not serve.
# A base image has its own torch, with what belongs to it, which must stay.
RUN HOLDFAST_WHEEL_WITHOUT_PAGE=1 pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src \
    && grep -vE '^(torch|triton|nvidia|cuda|numpy)' /src/requirements.lock > /wheels/requirements.lock

# Give an image with CUDA and your torch here: --build-arg BASE=…
# hadolint ignore=DL3006
FROM ${BASE}
COPY --from=wheel /wheels /wheels
# The versions that the tests of this version of Holdfast ran with.
RUN pip install --no-cache-dir --constraint /wheels/requirements.lock \
        "$(ls /wheels/holdfast-*.whl)[trainer,s3]" \
    && rm -rf /wheels
# Ranks end with the job, not with a signal to the first process of the container.
CMD ["python", "-c", "import holdfast.trainer, torch; print(torch.__version__)"]
