/*
Who am I? Rank and number of ranks, from whatever started the processes. The first that matches counts:
    --rank R/P@HOST:PORT or R/P@PATH                    typed by hand
    RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE      torchrun, dev/tools/launch
    OMPI_COMM_WORLD_RANK, ..._SIZE, ..._LOCAL_RANK      mpirun of Open MPI
    PMI_RANK, PMI_SIZE, MPI_LOCALRANKID                 MPICH, Intel MPI
    SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID           srun (SLURM_STEP_ID shows that it was srun)
else one process. Two that contradict each other are an error, for P processes that each believe to be alone would train
P copies. One nesting is normal: srun starts one launcher per node, which then starts more ranks than Slurm knows of.
HOST:PORT is where rank 0 listens (MASTER_ADDR, MASTER_PORT), PATH a file in which it says so (MASTER_ADDR with a
slash); with either ranks talk over TCP, without it over MPI.
LLMC_SECRET in the environment, the same on all ranks, keeps strangers out; launch makes one, and so does rank 0 in the
file at PATH.
Errors: fail_input, one line.
Explained in doc/ranks.md
*/
#ifndef LLMC_COMM_LAUNCH_H
#define LLMC_COMM_LAUNCH_H
#include "../core/outfile.h"  // fail_input, PATH_BYTES

typedef struct {
    int rank, size;
    int local_rank, local_size;  // on this machine; -1: not known
    const char* source;          // who said so: "RANK and WORLD_SIZE"
    char host[PATH_BYTES];       // of rank 0, or a path: the file in which it says where it listens; "": not given
    int port;                    // 0 with a file
    const char* run_id;          // the same in all ranks of one start, another in the next; "": not known
    const char* secret;          // which ranks prove to know when they meet over TCP; "": none
    int is_plan;                 // this process is alone, and plans what that rank would do (run/plan.h)
} RankPlace;

enum { SECRET_LEAST = 16, SECRET_BYTES = 256 };

// a whole number in 0..limit-1 from the environment; -1 when the variable is not set
static inline int place_env_number_(const char* name, int limit) {
    const char* text = getenv(name);
    char* end;
    if (!text || !*text) { return -1; }
    long x = strtol(text, &end, 10);
    if (*end || x < 0 || x >= limit) {
        fail_input("%s: expected an integer 0..%d, found \"%.40s\"", name, limit - 1, text);
    }
    return (int)x;
}

enum { RANKS_MAX = 65536 };

// one family of variables; 0 when it is not there
static inline int place_from_(RankPlace* p, const char* source, const char* rank, const char* size,
                              const char* local_rank, const char* local_size) {
    RankPlace found = {place_env_number_(rank, RANKS_MAX),
                       place_env_number_(size, RANKS_MAX),
                       place_env_number_(local_rank, RANKS_MAX),
                       place_env_number_(local_size, RANKS_MAX),
                       source,
                       "",
                       0,
                       "",
                       "",
                       0};
    if (found.rank < 0 && found.size < 0) { return 0; }
    if (found.rank < 0 || found.size < 0) { fail_input("%s: found only one of %s and %s", source, rank, size); }
    if (found.rank >= found.size) {
        fail_input("%s=%d: expected a rank below %s=%d", rank, found.rank, size, found.size);
    }
    *p = found;
    return 1;
}

// do ranks meet by a file? Its path has a slash, no name of a machine has
static inline int place_has_file(const RankPlace* p) { return strchr(p->host, '/') != NULL; }

// --rank R/P@HOST:PORT, where an IPv6 address stands in brackets, or R/P@PATH
static inline void place_from_text_(RankPlace* p, const char* text) {
    int used = 0;
    const char *at = strchr(text, '@'), *colon = strrchr(text, ':');
    p->source = "--rank";
    p->local_rank = p->local_size = -1;
    int good = sscanf(text, "%d/%d%n", &p->rank, &p->size, &used) == 2 && text + used == at && p->rank >= 0 &&
               p->rank < p->size && p->size < RANKS_MAX && strlen(at + 1) < sizeof p->host;
    int by_file = good && strchr(at, '/');
    int by_port = good && colon > at + 1 && sscanf(colon, ":%d%n", &p->port, &used) == 1 && colon[used] == '\0' &&
                  p->port > 0 && p->port < 65536;
    if (!by_file && !by_port) {
        fail_input("--rank: expected R/P@HOST:PORT or R/P@PATH (with a slash) and 0 <= R < P, as in "
                   "1/4@10.0.0.1:29500, found \"%s\"", text);
    }
    if (by_file) {
        p->port = 0;
        snprintf(p->host, sizeof p->host, "%s", at + 1);
        return;
    }
    int bracket = at[1] == '[' && colon[-1] == ']';
    snprintf(p->host, sizeof p->host, "%.*s", (int)(colon - at - 1 - 2 * bracket), at + 1 + bracket);
}

static inline void place_contradiction_(const RankPlace* a, const RankPlace* b) {
    int nested = strcmp(b->source, "Slurm") == 0 && a->size > b->size;
    if ((a->rank == b->rank && a->size == b->size) || nested) { return; }
    fail_input("%s says rank %d of %d, but %s says rank %d of %d: unset one of them", a->source, a->rank, a->size,
               b->source, b->rank, b->size);
}

// LLMC_SECRET, which programs that we start do not find any more. In the environment, for a command line is read by
// everybody on the machine; it need not be there, for clusters start ranks that know of none.
static inline const char* place_secret_(const RankPlace* p) {
    const char* text = getenv("LLMC_SECRET");
    const size_t n = text ? strlen(text) : 0;
    if (!text) { return ""; }
    if (p->size > 1 && (n < SECRET_LEAST || n >= SECRET_BYTES)) {
        fail_input("LLMC_SECRET: expected %d to %d characters, found %zu (openssl rand -hex 16 makes a good one)",
                   SECRET_LEAST, SECRET_BYTES - 1, n);
    }
    char* copy = string_copy(text);
    unsetenv("LLMC_SECRET");
    return copy;
}

// typed: the value of --rank, "" when it was not given
static inline RankPlace rank_place(const char* typed) {
    RankPlace found[5];
    int n = 0;
    memset(found, 0, sizeof found);
    if (*typed) { place_from_text_(&found[n++], typed); }
    n += place_from_(&found[n], "RANK and WORLD_SIZE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE");
    n += place_from_(&found[n], "mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK",
                     "OMPI_COMM_WORLD_LOCAL_SIZE");
    n += place_from_(&found[n], "PMI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS");
    if (getenv("SLURM_STEP_ID")) {
        n += place_from_(&found[n], "Slurm", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE");
    }
    for (int i = 1; i < n; i++) { place_contradiction_(&found[0], &found[i]); }
    RankPlace alone = {0, 1, 0, 1, "", "", 0, "", "", 0}, p = n > 0 ? found[0] : alone;
    const char *host = getenv("MASTER_ADDR"), *elastic = getenv("TORCHELASTIC_RUN_ID"), *slurm = getenv("SLURM_JOB_ID");
    if (!*p.host && host) {
        snprintf(p.host, sizeof p.host, "%s", host);
        p.port = place_has_file(&p) ? 0 : place_env_number_("MASTER_PORT", 65536);
        if (p.port <= 0 && p.size > 1 && !place_has_file(&p)) {
            fail_input("MASTER_PORT: expected a port 1..65535 beside MASTER_ADDR=%s", host);
        }
    }
    p.run_id = elastic ? elastic : slurm ? slurm : "";
    p.secret = place_secret_(&p);
    return p;
}
#endif  // LLMC_COMM_LAUNCH_H
