// Command tunnel reaches edge nodes that sit behind NAT. It runs as `tunnel cloud`,
// which edges dial and front doors listen on, or as `tunnel edge`, which dials the
// cloud and, when asked, local targets. `tunnel demo` runs both on this machine.
//
// This package holds flags, signals and wiring. The one ordered list of modules is
// in cloud.go for the cloud and in edge.go for the edge, and nowhere else.
package main

import (
	"context"
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	_ "golang.org/x/crypto/x509roots/fallback" // the image, and some machines, have no file of CAs for wss:// and https://

	"tunnel.example/tunnel/conf"
	"tunnel.example/tunnel/pkg/auth"
	"tunnel.example/tunnel/pkg/setup"
	"tunnel.example/tunnel/pkg/tunnel"
)

// Exit codes.
const (
	exitOK      = 0
	exitRuntime = 1
	exitUsage   = 2
	exitConfig  = 3
	exitRefused = 4 // by the other side
	exitAway    = 5 // a node is not connected, or does not answer
)

// exitError is an error that chooses the exit code.
type exitError struct {
	code int
	err  error // nil: its text is printed already
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}
func (e *exitError) Unwrap() error { return e.err }

func configError(err error) error { return &exitError{exitConfig, err} }

func main() {
	// Libraries log here what has no other place, such as bytes that a kubelet sends unasked
	// (net/http). The bytes may be anything, so they are dropped.
	log.SetOutput(io.Discard)
	ctx, stop := stopOnSignal(context.Background(), os.Stderr)
	root, args := rootFor(os.Args)
	code := execute(ctx, root, args, os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// doubled is the time within which two signals count as one. timeout(1), for example, signals
// a process and then its group.
const doubled = 250 * time.Millisecond

// stopOnSignal returns a context that ends with the first SIGINT, SIGTERM or SIGHUP. A cloud or an edge then drains.
// The kernel sends SIGHUP when the terminal is closed. A cloud and an edge handle SIGHUP themselves: see takeHangups.
// A second signal stops the process at once.
func stopOnSignal(ctx context.Context, stderr io.Writer) (context.Context, func()) {
	ctx, cancel := context.WithCancel(ctx)
	// Capacity 2: signal.Notify never blocks, and drops a signal that finds no room. Never closed.
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	if !signal.Ignored(syscall.SIGHUP) { // nohup(1) has a process ignore SIGHUP
		signal.Notify(signals, syscall.SIGHUP)
	}
	go func() {
		<-signals
		cancel()
		time.Sleep(doubled)
		for len(signals) > 0 { // a busy machine may deliver signals late, so any number until now counts as the first
			<-signals
		}
		<-signals
		fmt.Fprintln(stderr, "tunnel: stopped by a second signal")
		os.Exit(exitRuntime)
	}()
	return ctx, cancel
}

// run executes a command line of tunnel and returns the exit code.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	return execute(ctx, newRoot(), args, stdout, stderr)
}

// execute executes a command line of root and returns the exit code.
func execute(ctx context.Context, root *cobra.Command, args []string, stdout, stderr io.Writer) int {
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		return exitOK
	}
	chosen, ok := errors.AsType[*exitError](err)
	unwritten, isFile := errors.AsType[*fs.PathError](err)
	switch {
	case ok && chosen.err == nil:
		return chosen.code
	case ok:
	case isFile && unwritten.Op == "write": // standard output leads to a full disk, for example
		chosen = &exitError{exitRuntime, err}
	default: // every other error of cobra's own is about the command line
		chosen = &exitError{exitUsage, errors.New(withoutSecrets(err.Error(), args))}
	}
	for line := range strings.SplitSeq(joinTokens.ReplaceAllString(chosen.Error(), "***"), "\n") {
		fmt.Fprintln(stderr, "tunnel: "+tunnel.Printable(line)) // some errors are texts of a daemon or of a node
	}
	if chosen.code == exitUsage {
		fmt.Fprintf(stderr, "Run %s --help to see what there is.\n", cmd.CommandPath())
	}
	return chosen.code
}

// noArgs is cobra.NoArgs for a command that has no commands below it.
func noArgs(cmd *cobra.Command, args []string) error {
	if len(args) > 0 {
		return fmt.Errorf("%s takes only flags, such as --name value, not %q", cmd.CommandPath(), args[0])
	}
	return nil
}

// noSuchCommand is cobra.NoArgs for a command that only leads to others. Its error names the commands
// that are spelled like the argument; cobra.NoArgs names none.
func noSuchCommand(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return nil
	}
	text := fmt.Sprintf("unknown command %q for %q", args[0], cmd.CommandPath())
	cmd.SuggestionsMinimumDistance = 2 // edits; cobra's own default, which SuggestionsFor does not set
	if like := cmd.SuggestionsFor(args[0]); len(like) > 0 {
		slices.Sort(like) // cobra's order is that of help, once help was printed
		text += ": did you mean " + strings.Join(like, " or ") + "?"
	}
	return errors.New(text)
}

// flagError returns the error of a flag that cmd does not have. An unknown command has none of the
// flags behind it, so the error is about the command.
func flagError(cmd *cobra.Command, err error) error {
	if cmd.HasSubCommands() {
		if unknown := noSuchCommand(cmd, cmd.Flags().Args()); unknown != nil {
			return unknown
		}
	}
	return err
}

// joinTokens finds join tokens in an error, such as one that was pasted into --node.
var joinTokens = regexp.MustCompile(regexp.QuoteMeta(auth.JoinPrefix) + `[A-Za-z0-9_-]{8,}`)

// withoutSecrets replaces in a text every argument that could be a token. A secret does not
// belong on a command line, but operators paste one there, and logs keep printed text.
func withoutSecrets(text string, args []string) string {
	const longest, shortest = 24, 8 // bytes: a mistyped word is no longer, a token no shorter
	for _, a := range args {
		if len(a) > longest || len(a) >= shortest && strings.ContainsAny(a, "0123456789") {
			text = strings.ReplaceAll(text, a, "***")
		}
	}
	return text
}

func newRoot() *cobra.Command {
	var old superedgeFlags
	root := &cobra.Command{
		Use:   "tunnel",
		Short: "Reach Kubernetes edge nodes that sit behind NAT",
		Long: `tunnel connects edge nodes that can only dial out with a cloud that has to reach them:
kubectl logs, exec, attach, port-forward and top, and TCP services.

  tunnel demo                                         see it work on this machine, without Kubernetes

  tunnel init --address HOST:PORT                     make what a cloud needs
  tunnel cloud                                        run the end that edges dial
  tunnel token create --node NAME                     let a node join; prints the line to paste there
  tunnel join                                         make this machine that node
  tunnel edge                                         run the end on a node

  tunnel ls                                           list nodes, connected and missing
  tunnel forget NODE                                  remove a node that is gone for good from that list
  tunnel status                                       show the status of the cloud or the edge here
  tunnel ping NODE                                    measure the round trip to a node
  tunnel trace NODE HOST:PORT                         find which step to a target behind a node refuses
  tunnel tap [NODE]                                   show conns as they open and end
  tunnel top                                          show the busiest nodes
  tunnel services ls|explain|watch                    show what the edge here does with Services
  tunnel check                                        find what is wrong here, and what to do
  tunnel cert status                                  show certificates, and when they end

  tunnel token list|revoke                            list tokens, revoke a node
  tunnel config check                                 report the problems of a configuration
  tunnel reload                                       let a running cloud or edge read it again
  tunnel forward add|rm|ls                            TCP ports of a running cloud, without a change of the file
  tunnel restart                                      replace the process of a running cloud or edge, without an outage
  tunnel drain                                        take a running cloud or edge out of service
  tunnel diag                                         collect the state of a daemon for troubleshooting

Every command reads the configuration that -c FILE names. Without -c the cloud's file is
/etc/tunnel/cloud.toml and the edge's is /etc/tunnel/edge.toml, which init and join write.

Exit codes: 0 ok, 1 failed while running, 2 wrong command line, 3 wrong configuration,
4 refused by the other side, 5 a node is away.`,
		Args:          noSuchCommand,
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE:          old.run,
	}
	old.register(root)
	// Not cobra's own version flag, which prints another text.
	root.Flags().BoolVar(&old.version, "version", false, "print what tunnel version prints")
	root.SetFlagErrorFunc(flagError)
	logs := new(logFlags)
	logs.register(root)
	endWithInput(root)
	root.AddCommand(newCloudCommand(logs), newEdgeCommand(logs), newConfigCommand(logs), newDemoCommand(),
		newVersionCommand(), newInitCommand(), newTokenCommand(logs), newJoinCommand(), newManCommand(),
		newLsCommand(), newForgetCommand(), newStatusCommand(), newPingCommand(), newReloadCommand(),
		newForwardCommand(), newCheckCommand(), newCertCommand(), newRestartCommand(), newDrainCommand(),
		newDiagCommand(), newTapCommand(), newTopCommand(), newTraceCommand(), newServicesCommand())
	root.AddCommand(systemCommands()...)
	old.logs = logs
	completeNoFiles(root)
	return root
}

// completeNoFiles has shells offer no files as arguments of commands that take none. A flag may take a file.
func completeNoFiles(cmd *cobra.Command) {
	for _, c := range cmd.Commands() {
		completeNoFiles(c)
	}
	if !cmd.HasSubCommands() && !cmd.Hidden && cmd.ValidArgsFunction == nil {
		cmd.ValidArgsFunction = cobra.NoFileCompletions
	}
}

// superedgeFlags is the command line of SuperEdge's tunnel: tunnel --m=cloud --c=FILE.
type superedgeFlags struct {
	mode, file string
	version    bool // --version, which is not SuperEdge's
	logs       *logFlags
}

func (o *superedgeFlags) register(root *cobra.Command) {
	f := root.Flags()
	for _, name := range []string{"m", "mode"} {
		f.StringVar(&o.mode, name, "", "cloud or edge (SuperEdge's form of the command)")
	}
	for _, name := range []string{"c", "conf"} {
		f.StringVar(&o.file, name, "", "configuration file (SuperEdge's form of the flag)")
	}
	// SuperEdge's manifests set the flags of SuperEdge's logging library. tunnel accepts and ignores them.
	f.String("log-dir", "", "ignored")
	f.Bool("alsologtostderr", false, "ignored")
	f.Bool("logtostderr", false, "ignored")
	f.Int("v", 0, "ignored")
	f.VisitAll(func(flag *pflag.Flag) { flag.Hidden = true })
}

func (o *superedgeFlags) run(cmd *cobra.Command, _ []string) error {
	switch {
	case o.version:
		fmt.Fprint(cmd.OutOrStdout(), versionText())
		return nil
	case o.mode == "" && o.file == "":
		return cmd.Help()
	case o.file == "":
		return &exitError{exitUsage, errors.New("--m needs --c=FILE beside it")}
	case o.mode == "cloud":
		return runCloud(cmd.Context(), o.file, o.logs.logger(cmd.ErrOrStderr()), &o.logs.now)
	case o.mode == "edge":
		return runEdge(cmd.Context(), o.file, o.logs.logger(cmd.ErrOrStderr()), &o.logs.now)
	}
	return &exitError{exitUsage, fmt.Errorf("--m is cloud or edge, not %q", o.mode)}
}

// logFlags are the flags for logging.
type logFlags struct {
	level, format string
	now           slog.LevelVar // the level of the loggers; the admin socket changes it
}

func (l *logFlags) register(root *cobra.Command) {
	f := root.PersistentFlags()
	f.StringVar(&l.level, "log-level", "info", "debug, info, warn or error")
	f.StringVar(&l.format, "log-format", "text", "text or json")
	root.PersistentPreRunE = func(*cobra.Command, []string) error { return l.check() }
}

func (l *logFlags) check() error {
	if l.format != "text" && l.format != "json" {
		return &exitError{exitUsage, fmt.Errorf("--log-format is text or json, not %q", l.format)}
	}
	if err := new(slog.Level).UnmarshalText([]byte(l.level)); err != nil {
		return &exitError{exitUsage, fmt.Errorf("--log-level is debug, info, warn or error, not %q", l.level)}
	}
	return nil
}

func (l *logFlags) logger(w io.Writer) *slog.Logger {
	opts := &slog.HandlerOptions{Level: &l.now}
	var level slog.Level
	if err := level.UnmarshalText([]byte(l.level)); err == nil { // else unreachable: check has run
		l.now.Set(level)
	}
	if l.format == "json" {
		opts.ReplaceAttr = forMachines
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}

// forMachines returns an attribute as it stands in JSON. A duration is a number of seconds, and its key says so.
// Anything that has a text, such as an address, is that text.
func forMachines(_ []string, a slog.Attr) slog.Attr {
	if a.Value.Kind() == slog.KindDuration {
		return slog.Float64(a.Key+"_seconds", a.Value.Duration().Seconds())
	}
	if a.Value.Kind() != slog.KindAny {
		return a
	}
	switch v := a.Value.Any().(type) {
	case error, json.Marshaler, encoding.TextMarshaler: // slog writes them as texts, or as they ask for
	case fmt.Stringer:
		return slog.String(a.Key, v.String())
	}
	return a
}

// environment returns the settings that a process has beside its configuration file.
func environment() conf.Env {
	host, err := os.Hostname()
	if err != nil {
		host = "" // if the name is needed, conf reports that it is missing
	}
	return conf.Env{
		NodeName: os.Getenv("NODE_NAME"), HostName: host,
		PodIP: os.Getenv("POD_IP"), PodName: os.Getenv("POD_NAME"), PodNamespace: os.Getenv("POD_NAMESPACE"),
	}
}

// elsewhere is the environment of a command beside a running cloud.
func elsewhere() conf.Env {
	env := environment()
	env.Elsewhere = true
	return env
}

// The configuration files that init and join write into setup.DefaultDir.
const (
	cloudFile = "cloud.toml"
	edgeFile  = "edge.toml"
)

// configFlag is the flag -c, --config of a command.
type configFlag struct {
	file     string
	defaults []string // paths of the files that the command reads without the flag
}

// register adds the flag to a command. names are the defaults, in setup.DefaultDir.
func (c *configFlag) register(cmd *cobra.Command, names ...string) {
	for _, name := range names {
		c.defaults = append(c.defaults, filepath.Join(setup.DefaultDir, name))
	}
	cmd.Flags().StringVarP(&c.file, "config", "c", "",
		"configuration `FILE` (TOML); without -c: "+strings.Join(c.defaults, " and ")+", if there")
	if err := cmd.MarkFlagFilename("config", "toml"); err != nil {
		panic(err) // the flag was added a line above
	}
}

// files returns the file of the flag, or without the flag the defaults that exist.
func (c *configFlag) files() ([]string, error) {
	if c.file != "" {
		return []string{c.file}, nil
	}
	var found []string
	for _, path := range c.defaults {
		// A file that this user may not see counts: reading it fails with a better error than the one below.
		if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
			found = append(found, path)
		}
	}
	if found == nil {
		return nil, &exitError{exitUsage, fmt.Errorf("name the configuration file with -c FILE: "+
			"there is no %s, which would be read without -c", strings.Join(c.defaults, " and no "))}
	}
	return found, nil
}

// path returns the first of files.
func (c *configFlag) path() (string, error) {
	files, err := c.files()
	if err != nil {
		return "", err
	}
	return files[0], nil
}

// newGroup returns a command that only holds other commands.
func newGroup(name, short string) *cobra.Command {
	return &cobra.Command{
		Use: name, Short: short, Args: noSuchCommand, // else cobra accepts any word
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
}

func newConfigCommand(logs *logFlags) *cobra.Command {
	var file configFlag
	config := newGroup("config", "Work with configuration files")
	check := &cobra.Command{
		Use:   "check [-c FILE]",
		Short: "Report all problems of a configuration file and of the files it names",
		Long: `check reports all problems of a configuration file, and of the files it names. It prints warnings, too. It
opens no port, and a running cloud or edge does not notice.

Exit codes: 0 no problem, 3 problems.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			files, err := file.files()
			if err != nil {
				return err
			}
			var errs []error
			for _, f := range files {
				errs = append(errs, checkConfig(cmd, f, logs.logger(cmd.ErrOrStderr())))
			}
			if err = errors.Join(errs...); err != nil {
				return configError(err)
			}
			return nil
		},
	}
	file.register(check, cloudFile, edgeFile)
	config.AddCommand(check)
	return config
}

// checkConfig prints that a configuration file is good, or returns its problems.
func checkConfig(cmd *cobra.Command, file string, log *slog.Logger) error {
	checked, err := conf.Check(file, environment())
	if err != nil {
		return err
	}
	for _, w := range checked.Warnings {
		fmt.Fprintln(cmd.ErrOrStderr(), "warning: "+w)
	}
	// The modules check the content of their files. Wiring them opens no listener.
	var modes []string
	var errs []error
	if checked.Cloud != nil {
		modes = append(modes, "cloud")
		_, err = newCloud(checked.Cloud, log)
		errs = append(errs, err)
	}
	if checked.Edge != nil {
		modes = append(modes, "edge, node "+string(checked.Edge.Node))
		_, err = newEdge(checked.Edge, log)
		errs = append(errs, err)
	}
	if err = errors.Join(errs...); err != nil {
		return err
	}
	fmt.Fprintf(cmd.OutOrStdout(), "%s: ok (%s)\n", file, strings.Join(modes, "; "))
	return nil
}
