/*
Starts P ranks of a trainer, on this machine or on several, and behaves like one program.
    make launch && ./launch -n 4 ./train_gpt2 --train book.txt --model tiny
    ./launch --hosts a,b -n 4 --restarts 3 ./train_gpt2 --train book.txt --model tiny --run runs/book
Each process gets torchrun's variables (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT), a run
id and LLMC_SECRET, which is drawn anew in each start and which ranks prove to know when they meet; variables of other
launchers are taken away. Rank 0 keeps the terminal; lines of the others say "[rank 2]", or "[rank 2 @b]".
SIGINT, SIGTERM, SIGUSR1 and SIGHUP go on to all ranks. When one fails, the others have 5 s to say so and are then
killed. When launch itself is killed they get SIGTERM.
Status: 0 when all ranks end with 0, else that of the first that failed (128 + the signal for one that was killed).

--hosts: on each, ssh starts this program once more, by the path it has here, as `launch --agent`. They talk like this:
    agent, stdout    "launch 3 ready ADDRESS PORT": where rank 0 would listen, a port that is kept free for it
    launch           8 digits, the number of bytes that follow, and these: texts, each with a zero behind it:
                     folder, first rank, ranks here, ranks in all, number of variables, the variables, the command
    launch           a byte for each signal, its number; the end: SIGTERM to the ranks
    agent, stdout    what rank 0 prints there; the lines of all others are on stderr
So the secret is in no list of arguments, and ranks end where the connection does. An agent ends with the status of its
ranks, ssh with 255 when it is the connection that failed.

--restarts: a run that ended otherwise than by status 0, a mistake (2, 126, 127) or a signal to launch begins again with
--continue: from its newest checkpoint, or anew. LLMC_JOB tells rank 0 which run is meant: one whose last start, in
settings.json, was by this launch. Hosts that do not answer then are left out.
On one machine LLMC_LAUNCH is the name by which this program was called: ranks say by it how a run is gone on with.
Explained in doc/ranks.md
*/
#include "launch_grid.h"       // typed, fitting_ranks, grid
#include "launch_hosts.h"      // free_port, run_agent, reach_hosts, send_task
#include "launch_processes.h"  // start_rank, wait_for_all

// ---- this machine ----

static void start_here(int start) {
    const int port = free_port("127.0.0.1");
    if (port == 0) { fail("no free port: %s", strerror(errno)); }
    n_children = (int)options.n;
    set_environment("127.0.0.1", port, start);
    setenv("LLMC_LAUNCH", program_invocation_name, 1);
    set_local_environment(n_children, n_children);
    for (int i = 0; i < n_children; i++) { start_rank(i, i, ""); }
}

// ---- hosts ----

// the first start: every host answers, or the user has something to mend
static void need_host(int i, int status) {
    const char* name = hosts[i].name;
    if (*hosts[i].address) { return; }
    for (int k = 0; k < n_hosts; k++) { leave_host(k); }
    if (status == 126 || status == 127) {
        fail("--hosts: %s: expected this program there, too, at %s: none that runs was found", name, own_path());
    }
    if (status < 0) { fail("--hosts: %s: expected an answer within %d s, found none", name, READY_SECONDS); }
    fail("--hosts: %s cannot be reached: expected \"%s %s true\" to work, found status %d", name, options.ssh, name,
         status);
}

// Deals out the ranks, host by host; returns their number, 0: too few. before: of the first start, 0 in that
static int deal_ranks(int before) {
    int most = 0;
    for (int i = 0; i < n_hosts; i++) { most += *hosts[i].address ? hosts[i].most : 0; }
    const int n = before > 0 ? fitting_ranks(most, before) : most;
    for (int i = 0, left = n; i < n_hosts; i++) {
        const int here = !*hosts[i].address ? 0 : left < hosts[i].most ? left : hosts[i].most;
        hosts[i].n_ranks = here;
        left -= here;
    }
    char divisor[48] = "";
    if (before > 0 && by_divisor()) { snprintf(divisor, sizeof divisor, " and divide %d", before); }
    if (n != most) { say("%d ranks can run, of which %d fit %s%s", most, n, grid(), divisor); }
    if (n == 0) { say("too few ranks are left: giving up"); }
    else if (n < options.min_ranks) {
        say("%d ranks can run, fewer than --min-ranks %ld: giving up", n, options.min_ranks);
    }
    return n >= options.min_ranks ? n : 0;
}

// Begins on the hosts that answer; returns the number of ranks, 0 when there are too few
static int start_on_hosts(int start, int before) {
    int first = 0, master = -1;
    is_killing = 0;
    reach_hosts();
    if (signalled) { return 0; }
    for (int i = 0; i < n_hosts; i++) {
        if (before == 0) { need_host(i, children[i].pid > 0 ? -1 : children[i].status); }
        else if (!*hosts[i].address) { say("host %s cannot be reached: it is left out", hosts[i].name); }
    }
    const int n = deal_ranks(before);
    for (int i = 0; i < n_hosts; i++) {
        if (n == 0 || hosts[i].n_ranks == 0) { leave_host(i); }
        else if (master < 0) { master = i; }
    }
    if (n == 0) { return 0; }
    if (hosts[master].port == 0) {
        fail("--hosts: %s: expected a name of an address of that machine, at which the others reach it, found none: "
             "give the number", hosts[master].name);
    }
    set_environment(hosts[master].address, hosts[master].port, start);
    for (int i = 0; i < n_hosts; i++) {
        if (hosts[i].n_ranks == 0) { continue; }
        if (!send_task(i, first, n)) { close_end(&children[i].in); }  // it has left meanwhile
        first += hosts[i].n_ranks;
    }
    return n;
}

// ---- the command line ----

static const char help[] =
    "usage: launch -n RANKS [OPTION...] PROGRAM [OPTION OF THE PROGRAM...]\n"
    "Starts ranks of a trainer, which train one model:\n"
    "    ./launch -n 4 ./train_gpt2 ...                    4 ranks on this machine\n"
    "    ./launch --hosts a,b -n 4 ./train_gpt2 ...        8 ranks on two, over ssh\n"
    "    ./launch -n 4 --restarts 3 ./train_gpt2 --run runs/book ...\n"
    "\n"
    "  -n RANKS           1..1024; with --hosts on each of them, by default 1\n"
    "  --hosts A,B,C      the machines; rank 0 is on the first and listens at its address alone. Each has the same\n"
    "                     folder, program and launch, under the same paths, and takes ssh without a password\n"
    "  --hosts FILE       a line for each: its name and, if it is not -n, its number of ranks; # begins a comment\n"
    "  --ssh COMMAND      instead of \"" USUAL_SSH "\": a host and\n"
    "                     a command for its shell follow\n"
    "  --restarts N       when a rank dies or hangs: up to N times again, from the newest checkpoint of the --run, to\n"
    "                     the same bits. Hosts that do not answer any more are left out\n"
    "  --min-ranks M      with --hosts and --restarts: give up where fewer ranks than M are left\n"
    "doc/ranks.md has more.\n";

// the value of an option of ours; the program comes later
static const char* option_value(int argc, char** argv, int i) {
    if (i + 1 >= argc) { fail("%s: expected a value, found nothing", argv[i]); }
    return argv[i + 1];
}

// the shell's rule holds here, too: a name without a slash is looked for in PATH and nowhere else
static void check_program(const char* name) {
    char file[4096], *rest = NULL, *folders = strdup(getenv("PATH") ? getenv("PATH") : "");
    int found = strchr(name, '/') != NULL;
    for (rest = folders; rest && !found;) {
        const char* folder = strsep(&rest, ":");
        snprintf(file, sizeof file, "%s/%s", *folder ? folder : ".", name);  // "": this one
        found = access(file, X_OK) == 0;
    }
    free(folders);
    if (!found && access(name, X_OK) == 0) { fail("%s: not in PATH: expected ./%s for the one here", name, name); }
    const char* base = strrchr(name, '/') ? strrchr(name, '/') + 1 : name;
    if (!options.hosts && strncmp(base, "train_", 6) == 0 && access(name, F_OK) != 0 && (!found || base != name)) {
        fail("%s: not there: make %s builds it", name, base);
    }
}

static void check_options(void) {
    const int n = (int)(options.n < 0 ? 1 : options.n);
    long n_ranks = 0;
    if (options.hosts) { read_hosts(options.hosts, n); }
    find_hosts();
    for (int i = 0; i < n_hosts; i++) { n_ranks += hosts[i].most; }
    if (n_ranks > MAX_RANKS) { fail("--hosts: expected at most %d ranks, found %ld", MAX_RANKS, n_ranks); }
    if (!options.hosts && options.min_ranks > 0) { fail("--min-ranks: is for --hosts, of which some may be left out"); }
    if (options.hosts && options.min_ranks > n_ranks) {
        fail("--min-ranks: expected at most the %ld ranks of --hosts, found %ld", n_ranks, options.min_ranks);
    }
    if (options.min_ranks > 0 && options.restarts == 0) { fail("--min-ranks: is for --restarts N"); }
    const size_t n_ssh = strlen(options.ssh);
    if (strspn(options.ssh, " ") == n_ssh || n_ssh >= LINE_BYTES) {
        fail("--ssh: expected a command of 1..%d bytes, found %zu", LINE_BYTES - 1, n_ssh);
    }
    const int has_run = typed("--run") || typed("-o") || typed("--out-dir") || typed("--output-dir") || typed("--args");
    if (options.restarts > 0 && !has_run) {
        fail("--restarts: expected --run DIR behind %s, to go on from its newest checkpoint, found none",
             options.command[0]);
    }
}

static void read_options(int argc, char** argv) {
    int i = 1;
    for (; i < argc && argv[i][0] == '-'; i += 2) {
        const char* name = argv[i];
        if (name[1] == 'n' && name[2] >= '0' && name[2] <= '9') {  // -n4
            options.n = read_number("-n", name + 2, 1, MAX_RANKS);
            i--;
        } else if (strcmp(name, "-n") == 0) {
            options.n = read_number(name, option_value(argc, argv, i), 1, MAX_RANKS);
        } else if (strcmp(name, "--hosts") == 0) { options.hosts = option_value(argc, argv, i); }
        else if (strcmp(name, "--ssh") == 0) { options.ssh = option_value(argc, argv, i); }
        else if (strcmp(name, "--restarts") == 0) {
            options.restarts = read_number(name, option_value(argc, argv, i), 0, 1000000);
        } else if (strcmp(name, "--min-ranks") == 0) {
            options.min_ranks = read_number(name, option_value(argc, argv, i), 1, MAX_RANKS);
        } else { fail("%.60s: unknown option: launch --help", name); }
    }
    if (i >= argc || (options.n < 0 && !options.hosts)) {
        fail("usage: launch -n RANKS PROGRAM [OPTION...], 1..%d ranks (launch --help says more)", MAX_RANKS);
    }
    options.command = argv + i;
    options.n_command = argc - i;
    check_program(options.command[0]);
    check_options();
}

// From now on the command goes on where there is a checkpoint, and begins anew where there is none. LLMC_JOB: it goes
// on with what ranks of this launch have begun, and with nobody else's run
static void add_continue(void) {
    if (typed("--continue") || typed("--resume") || typed("-y")) { return; }
    setenv("LLMC_JOB", own_id(), 1);
    char** longer = calloc((size_t)options.n_command + 2, sizeof(char*));
    if (!longer) { fail("no memory"); }
    memcpy(longer, options.command, sizeof(char*) * (size_t)options.n_command);
    longer[options.n_command++] = (char*)"--continue";
    options.command = longer;
}

// a start with n_now ranks, fewer than the first, was refused: may a divisor of n be better?
static int tries_divisor(int status, int n_now, int n) {
    if (status != 2 || signalled || needs_divisor || n % n_now == 0) { return 0; }
    say("%d ranks are refused: a number that divides the %d of the first start is tried", n_now, n);
    return needs_divisor = 1;
}

// start after start; returns the status of the last
static int run_all(void) {
    int status = 0, n = 0, n_now = 0, n_refused = 0;
    for (int start = 0;; start++) {
        if (role == ON_THIS_MACHINE) {
            start_here(start);
            n = n_now = (int)options.n;
        } else {
            n_now = start_on_hosts(start, n);
            if (n_now == 0) { return status > 0 ? status : signalled ? 128 + signalled : 1; }
            if (start > 0) { say("%d ranks go on", n_now); }
            n = start == 0 ? n_now : n;
        }
        status = wait_for_all();
        if (tries_divisor(status, n_now, n)) {
            n_refused++;
            continue;
        }
        if (status == 0 || status == 2 || status == 126 || status == 127 || signalled) { return status; }
        const int restart = start - n_refused;
        if (restart == options.restarts) {
            if (restart > 0) { say("status %d after %d restarts: giving up", status, restart); }
            return status;
        }
        add_continue();
        say("the run ended with status %d: restart %d of %ld, from its newest checkpoint if it has one", status,
            restart + 1, options.restarts);
    }
}

int main(int argc, char** argv) {
    int standard = open("/dev/null", O_RDWR);  // started without descriptors 0 to 2, we would give their numbers away
    while (standard >= 0 && standard < 3) { standard = open("/dev/null", O_RDWR); }
    if (standard > 2) { close(standard); }
    if (argc == 2 && strcmp(argv[1], "--help") == 0) {
        fputs(help, stdout);
        return 0;
    }
    if (argc == 5 && strcmp(argv[1], "--agent") == 0) {
        role = AS_AGENT;
        return run_agent(argv[2], argv[3], argv[4]);
    }
    read_options(argc, argv);
    role = options.hosts ? ON_HOSTS : ON_THIS_MACHINE;
    catch_signals();
    return run_all();
}
