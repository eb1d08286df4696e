# Holdfast for a team's services: the commands, the page, Prefect's server and workers. No torch.
# Build it in the root of a checkout, after `make page`:
#   docker build -f infra/images/server.Dockerfile -t holdfast-server .
FROM python:3.11-slim-bookworm AS wheel
COPY . /src
# The wheel contains the page, which `make page` has built.
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src \
    && cp /src/requirements.lock /wheels

FROM python:3.11-slim-bookworm
# Slurm's commands and MUNGE, so that workers can submit jobs. The cluster's own packages must have
# the version of its controller: replace these where it differs.
RUN apt-get update \
    && apt-get install -y --no-install-recommends slurm-client=22.05.* munge=0.5.* tini=0.19.* \
    && rm -rf /var/lib/apt/lists/*
COPY --from=wheel /wheels /wheels
# The versions that the tests of this version of Holdfast ran with.
RUN pip install --no-cache-dir --constraint /wheels/requirements.lock \
        "$(ls /wheels/holdfast-*.whl)[server,redis]" \
    && rm -rf /wheels
# Jobs run as this account, so its number must be that of the account on the cluster.
ARG UID=1500
RUN useradd --uid "$UID" --create-home holdfast
# Prefect copies its page to this folder, which the account can write.
ENV PREFECT_UI_STATIC_DIRECTORY=/home/holdfast/.prefect/page
USER $UID
WORKDIR /home/holdfast
# A flow can outlive the worker that started it, so the container needs an init process.
ENTRYPOINT ["tini", "--"]
CMD ["holdfast", "--help"]
