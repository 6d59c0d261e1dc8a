"""The text of `fleetrun --help`, and why some options of other launchers are not supported."""

# \b keeps click from rewrapping a paragraph.
SUMMARY = """\
Run SCRIPT in every worker process, echo the output of worker 0, and report which worker failed first.

\b
Examples:
  fleetrun train.py                                   one worker per GPU, or one on the CPU
  fleetrun --gpus 0,1,2,3 --log_dir log train.py      four workers
  fleetrun --device cpu --gpus 0,1 train.py --lr 0.1  two workers on the CPU
  fleetrun --ips 10.0.0.1,10.0.0.2 train.py           two nodes; run this on both
  fleetrun --nnodes 2 --master 10.0.0.1:6069 --rank 0 train.py
                                                      the same; --rank 1 on the second node
  fleetrun --max_restarts 10 --elastic 2:4 train.py   four workers; continues with two or three
"""

EPILOG = """\
\b
Variables set in every worker:
  RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK MASTER_ADDR MASTER_PORT TORCHELASTIC_*
                            the same as with torchrun
  PADDLE_TRAINER_ID PADDLE_TRAINERS_NUM PADDLE_TRAINER_ENDPOINTS PADDLE_CURRENT_ENDPOINT
  PADDLE_RANK_IN_NODE       the same as with Paddle's launcher
  CUDA_VISIBLE_DEVICES      with GPUs: the selected ones
  FLAGS_selected_gpus       with GPUs: the index of this worker's own
  FLEETX_DEVICE             cpu or cuda
  FLEETX_PADDLE_API         fleetx or paddle, if --paddle-api is given
  OMP_NUM_THREADS           unless already set: cores of this machine / workers on it
  GLOO_SOCKET_IFNAME        unless already set: the network interface of this node, lo on a single node

\b
Variables that fleetrun reads:
  FLEETX_DEVICE             default for --device
  FLEETX_PADDLE_API         default for --paddle-api
  FLEETX_JOB_SECRET         default for the content of --secret_file; the workers do not see it
  FLAGS_START_PORT          first port in PADDLE_TRAINER_ENDPOINTS
                            [default: free ports on a single node, 6070 on several]
  CUDA_VISIBLE_DEVICES      the GPUs to select from

\b
Exit code:
  0 if every worker succeeded, 1 if one failed, 2 if the command line is wrong,
  128 + N if fleetrun, on this or another node, was stopped by signal N: 143 after SIGTERM, for a
  scheduler to start the job again
"""

_PARAMETER_SERVER = "fleetx has no parameter servers, every worker trains; remove this option"
_ELASTIC = "use --elastic MIN:MAX for a number of workers or nodes that changes, and --max_restarts for failures"
_RENDEZVOUS = "use --master HOST:PORT for the rendezvous and --rank for the rank of this node"
_STREAMS = "stdout and stderr of worker N always go to workerlog.N in --log_dir, and those of worker 0 are echoed"
_XPU = "XPUs are not supported; use --gpus or --device cpu"

# Options of Paddle's launchers (2.0 to 2.4) and of torchrun.
UNSUPPORTED = {
    **dict.fromkeys(
        ("servers", "workers", "heter_workers", "server_num", "worker_num", "heter_worker_num", "http_port"),
        _PARAMETER_SERVER,
    ),
    **dict.fromkeys(
        ("elastic_server", "elastic_level", "elastic_timeout", "np", "scale", "force", "host", "job_id"), _ELASTIC
    ),
    **dict.fromkeys(
        ("rdzv_backend", "rdzv_endpoint", "rdzv_id", "rdzv_conf", "master_addr", "master_port", "node_rank"),
        _RENDEZVOUS,
    ),
    **dict.fromkeys(("tee", "redirects", "local_ranks_filter"), _STREAMS),
    **dict.fromkeys(("xpus", "selected_xpus"), _XPU),
    "standalone": "a single node is the default; remove this option",
    "backend": "the backend depends on the device: gloo on cpu, nccl on cuda",
    "start_port": "set FLAGS_START_PORT instead",
    "log_level": "fleetrun has no log levels; to see torchelastic's log messages, set LOGLEVEL=INFO",
    "legacy": "there is only one launcher; remove this option",
    "no_python": "SCRIPT is always run by Python; start other programs from a script",
    "monitor_interval": "fleetrun notices immediately when a worker exits; remove this option",
    "start_method": "every worker is a separate process; remove this option",
}
