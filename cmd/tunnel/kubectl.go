package main

import (
	"archive/zip"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
)

// Names of this program's file under which kubectl runs it: for `kubectl edgetunnel`, and to complete its words.
const (
	kubectlPlugin   = "kubectl-edgetunnel"
	kubectlComplete = "kubectl_complete-edgetunnel"
)

const (
	// cloudPods selects the pods of a cloud. The manifests in deployment/ set these labels.
	cloudPods = "app.kubernetes.io/name=tunnel,app.kubernetes.io/component=cloud"
	// cloudNamespace and cloudContainer are those of the manifests.
	cloudNamespace = "tunnel-system"
	cloudContainer = "tunnel"
	// programInImage is the program in the image of the cloud, in which PATH leads nowhere.
	programInImage = "/tunnel"
	// kubectlEnd is how long kubectl may take to end after its input has ended.
	kubectlEnd = 5 * time.Second
	// completeTime bounds a completion: a person waits for the shell.
	completeTime = 5 * time.Second
)

// asks is which replicas a command of the plugin asks.
type asks int

const (
	asksAll    asks = iota // the command asks one replica, which answers for all replicas
	readsOne               // the command reads from one replica, no matter which
	changesOne             // the command changes one replica, which the user must choose if there are several
)

// pluginCommands are the commands that the plugin runs in a pod of the cloud.
func pluginCommands() map[string]asks {
	return map[string]asks{
		"ls": asksAll, "forget": asksAll, "ping": asksAll, "trace": asksAll, "top": asksAll, "tap": asksAll,
		"cert": asksAll, "status": readsOne, "check": readsOne, "diag": readsOne, "version": readsOne,
		"drain": changesOne, "reload": changesOne, "forward": changesOne,
	}
}

// rootFor returns the command of the name under which this program runs, and the command's arguments.
func rootFor(args []string) (*cobra.Command, []string) {
	switch strings.TrimSuffix(filepath.Base(args[0]), ".exe") {
	case kubectlPlugin:
		return newPlugin().cmd, args[1:]
	case kubectlComplete:
		return newPluginCompletion(), args[1:]
	}
	return newRoot(), args[1:]
}

// plugin runs commands in a pod of a cloud by kubectl, which knows clusters, credentials and the ways to a pod.
type plugin struct {
	namespace, context, kubeconfig, pod string
	cmd                                 *cobra.Command // has the streams

	endless bool // Ctrl-C ends the command without an error; set by run
}

// newPlugin returns a plugin with the command `kubectl edgetunnel`.
func newPlugin() *plugin {
	p := new(plugin)
	p.cmd = &cobra.Command{
		Use:         kubectlPlugin + " [flags] COMMAND [args]",
		Annotations: map[string]string{cobra.CommandDisplayNameAnnotation: "kubectl edgetunnel"},
		Short:       "Run tunnel's commands for operators in a pod of the cloud, as a plugin of kubectl",
		Long: `kubectl edgetunnel finds the pods of a cloud by their labels, and runs a command of tunnel in one of them.
The commands are ls, forget, status, ping, trace, top, tap, check, cert, diag, drain, reload, forward and version.

  kubectl edgetunnel ls --missing
  kubectl edgetunnel tap edge1 -o json
  kubectl edgetunnel -n my-namespace --context production ping edge1

Flags of kubectl stand before the command, and flags of the command behind it. "kubectl edgetunnel COMMAND --help"
explains a command. ls, forget, ping, trace, top, tap, cert status, cert renew and status --all ask all replicas. The
other commands ask one replica, by default the first pod that is ready; drain, reload, forward and cert rotate-ca need
--pod if there are several pods. diag writes its file on this machine.

The plugin is the program tunnel under the name kubectl-edgetunnel, and runs kubectl. It needs the rights to list
pods and to create pods/exec in the namespace of the cloud.

Exit codes: those of the command; 1 if kubectl fails or no pod is ready.`,
		Args:          cobra.ArbitraryArgs,
		SilenceErrors: true,
		SilenceUsage:  true,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return cmd.Help()
			}
			return p.run(cmd.Context(), args)
		},
	}
	f := p.cmd.Flags()
	f.SetInterspersed(false) // what follows the command belongs to the command
	f.StringVarP(&p.namespace, "namespace", "n", cloudNamespace, "`NAMESPACE` of the cloud")
	f.StringVar(&p.context, "context", "", "`CONTEXT` of the kubeconfig")
	f.StringVar(&p.kubeconfig, "kubeconfig", "", "`FILE` that names the cluster; without it kubectl's own")
	f.StringVar(&p.pod, "pod", "", "`POD` of the cloud to ask, ready or not")
	return p
}

// run runs a command in a pod.
func (p *plugin) run(ctx context.Context, args []string) error {
	which, known := pluginCommands()[args[0]]
	if !known {
		return fmt.Errorf("unknown command %q for %q: kubectl edgetunnel --help lists the commands", args[0],
			p.cmd.CommandPath())
	}
	local := newRoot()
	command, rest, err := local.Find(args)
	if err != nil {
		return err
	}
	if command.Name() == "rotate-ca" { // it changes files of one replica
		which = changesOne
	}
	if slices.ContainsFunc(rest, func(arg string) bool { return arg == "-h" || arg == "--help" }) {
		local.SetArgs(append(slices.Clone(args), "--help"))
		local.SetOut(p.cmd.OutOrStdout())
		return local.ExecuteContext(ctx)
	}
	if err = p.misplaced(rest, command); err != nil {
		return err
	}
	pod, err := p.choose(ctx, which)
	if err != nil {
		return err
	}
	p.endless = endless(command, rest)
	if args[0] == "diag" {
		return p.diag(ctx, pod, command, rest)
	}
	return p.exec(ctx, pod, pod.remote(command, args), p.cmd.OutOrStdout())
}

// misplaced returns an error if a flag of the plugin stands after the command: the plugin would pass that flag to the
// pod.
func (p *plugin) misplaced(rest []string, command *cobra.Command) error {
	for _, arg := range rest {
		name, _, _ := strings.Cut(arg, "=")
		short := name == "-n" && command.Flags().ShorthandLookup("n") == nil
		long := strings.HasPrefix(name, "--") && p.cmd.Flags().Lookup(name[2:]) != nil
		if short || long {
			return fmt.Errorf("write %s before %s: flags of kubectl stand before the command", name, command.Name())
		}
	}
	return nil
}

// cloudPod holds the fields that are used of a pod (k8s.io/api/core/v1).
type cloudPod struct {
	Metadata struct {
		Name              string `json:"name"`
		DeletionTimestamp string `json:"deletionTimestamp"`
	} `json:"metadata"`
	Spec struct {
		Containers []struct {
			Name string   `json:"name"`
			Args []string `json:"args"`
		} `json:"containers"`
	} `json:"spec"`
	Status struct {
		Phase      string `json:"phase"`
		Reason     string `json:"reason"`
		Message    string `json:"message"`
		Conditions []struct {
			Type    string `json:"type"`
			Status  string `json:"status"`
			Message string `json:"message"`
		} `json:"conditions"`
		ContainerStatuses []struct {
			State struct {
				Waiting struct {
					Reason  string `json:"reason"`
					Message string `json:"message"`
				} `json:"waiting"`
			} `json:"state"`
		} `json:"containerStatuses"`
	} `json:"status"`
}

// notReady returns why the pod is not ready; "": it is.
func (p *cloudPod) notReady() string {
	if p.Metadata.DeletionTimestamp != "" {
		return "it is being deleted"
	}
	if p.hasEnded() {
		return strings.TrimSuffix(cmp.Or(p.Status.Reason, p.Status.Phase)+": "+p.Status.Message, ": ")
	}
	for _, c := range p.Status.ContainerStatuses {
		if w := c.State.Waiting; w.Reason != "" {
			return strings.TrimSuffix(w.Reason+": "+w.Message, ": ")
		}
	}
	for _, c := range p.Status.Conditions {
		if c.Type != "Ready" {
			continue
		}
		if c.Status == "True" {
			return ""
		}
		return cmp.Or(c.Message, p.Status.Phase)
	}
	return p.Status.Phase
}

// hasEnded reports whether the pod never runs again, such as one that was evicted.
func (p *cloudPod) hasEnded() bool {
	return p.Status.Phase == "Failed" || p.Status.Phase == "Succeeded"
}

// remote returns the command line of a command in the pod.
func (p *cloudPod) remote(command *cobra.Command, args []string) []string {
	args = slices.Clone(args)
	given := slices.ContainsFunc(args, func(arg string) bool {
		return strings.HasPrefix(arg, "-c") || strings.HasPrefix(arg, "--config") || strings.HasPrefix(arg, "--socket")
	})
	if file := p.config(); !given && file != "" && (command.HasSubCommands() || command.Flag("config") != nil) {
		args = slices.Insert(args, 1, "--config="+file)
	}
	return args
}

// config returns the configuration file of the cloud in the pod; "": not known.
func (p *cloudPod) config() string {
	for _, c := range p.Spec.Containers {
		if c.Name != cloudContainer {
			continue
		}
		for i, arg := range c.Args {
			for _, name := range []string{"-c", "--config"} {
				if value, ok := strings.CutPrefix(arg, name+"="); ok {
					return value
				}
				if arg == name && i+1 < len(c.Args) {
					return c.Args[i+1]
				}
			}
		}
	}
	return ""
}

// choose returns the pod to ask.
func (p *plugin) choose(ctx context.Context, which asks) (*cloudPod, error) {
	var list struct {
		Items []*cloudPod `json:"items"`
	}
	var out bytes.Buffer
	get := p.kubectl(ctx, "get", "pods", "--selector="+cloudPods, "--output=json")
	get.Stdout, get.Stderr = &out, p.cmd.ErrOrStderr()
	if err := get.Run(); err != nil {
		return nil, kubectlFailed(err)
	}
	if err := json.Unmarshal(out.Bytes(), &list); err != nil {
		return nil, &exitError{exitRuntime, fmt.Errorf("kubectl get pods answers no list of pods: %w", err)}
	}
	var live, why []string // live: the pods that can be asked, with what is wrong with them
	var ready []*cloudPod
	slices.SortFunc(list.Items, func(a, b *cloudPod) int { return cmp.Compare(a.Metadata.Name, b.Metadata.Name) })
	for _, pod := range list.Items {
		name, wrong := pod.Metadata.Name, pod.notReady()
		switch {
		case name == p.pod:
			return pod, nil
		case wrong == "":
			ready, live = append(ready, pod), append(live, name)
			continue
		case !pod.hasEnded():
			live = append(live, name+" ("+wrong+")")
		}
		why = append(why, name+": "+wrong)
	}
	switch {
	case len(list.Items) == 0:
		return nil, &exitError{exitRuntime, fmt.Errorf("there is no pod with the labels %s in the namespace %s: "+
			"name the namespace of the cloud by kubectl edgetunnel --namespace NAMESPACE", cloudPods, p.namespace)}
	case p.pod != "":
		return nil, &exitError{exitRuntime, fmt.Errorf("the cloud in the namespace %s has no pod %s; it has %s",
			p.namespace, p.pod, cmp.Or(strings.Join(live, ", "), "none that runs"))}
	case which == changesOne && len(live) > 1:
		return nil, &exitError{exitUsage, fmt.Errorf("this changes one replica: choose it by "+
			"kubectl edgetunnel --pod POD; there are %s", strings.Join(live, ", "))}
	case len(ready) == 0:
		return nil, &exitError{exitRuntime, fmt.Errorf("no pod of the cloud is ready; look at "+
			"kubectl -n %s describe pod %s, or ask one by kubectl edgetunnel --pod POD\n%s",
			p.namespace, list.Items[0].Metadata.Name, strings.Join(why, "\n"))}
	}
	if which == readsOne && len(live) > 1 {
		fmt.Fprintf(p.cmd.ErrOrStderr(), "asking %s, one of %d pods; --pod chooses another\n",
			ready[0].Metadata.Name, len(live))
	}
	return ready[0], nil
}

// kubectl returns a command of kubectl with the flags of the plugin.
func (p *plugin) kubectl(ctx context.Context, args ...string) *exec.Cmd {
	all := []string{"--namespace=" + p.namespace}
	if p.context != "" {
		all = append(all, "--context="+p.context)
	}
	if p.kubeconfig != "" {
		all = append(all, "--kubeconfig="+p.kubeconfig)
	}
	return exec.CommandContext(ctx, "kubectl", append(all, args...)...)
}

// exec runs tunnel in the pod until it ends. When ctx is done, it ends the input of tunnel, so that tunnel ends
// itself: kubectl sends no signal to a process in a pod, and a killed kubectl leaves the process behind.
func (p *plugin) exec(ctx context.Context, pod *cloudPod, args []string, stdout io.Writer) error {
	flags := []string{"exec", pod.Metadata.Name, "--container=" + cloudContainer, "--stdin"}
	// In a terminal, top refreshes the screen, and kubectl brings Ctrl-C to it.
	stdin, _ := p.cmd.InOrStdin().(*os.File)
	terminal := args[0] == "top" && isTerminal(stdout) && stdin != nil && isTerminal(stdin)
	switch {
	case terminal:
		flags = append(flags, "--tty")
	case args[0] != cobra.ShellCompRequestCmd:
		args = append([]string{"--" + untilInputEnds}, args...)
	}
	cmd := p.kubectl(ctx, slices.Concat(flags, []string{"--", programInImage}, args)...)
	cmd.Stdout, cmd.Stderr, cmd.WaitDelay = stdout, p.cmd.ErrOrStderr(), kubectlEnd
	if terminal {
		cmd.Stdin = stdin
		cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) } // kubectl restores the terminal
	} else {
		input, err := cmd.StdinPipe()
		if err != nil {
			return &exitError{exitRuntime, err}
		}
		cmd.Cancel = input.Close
	}
	err := cmd.Run()
	if interrupted(err) { // this process gets the signal of Ctrl-C, too
		select {
		case <-ctx.Done():
		case <-time.After(signalTime):
		}
	}
	if ctx.Err() != nil && (p.endless || cmd.ProcessState != nil && cmd.ProcessState.Success()) {
		return nil
	}
	return kubectlFailed(err)
}

// signalTime is how long the signal that has ended kubectl may take to this process. If only kubectl was killed, its
// error comes that much later.
const signalTime = 2 * time.Second

// interrupted reports whether a signal has ended kubectl. On Windows, Ctrl-C ends a program with the exit code
// 0xC000013A.
func interrupted(err error) bool {
	exit, ok := errors.AsType[*exec.ExitError](err)
	return ok && (exit.ExitCode() < 0 || exit.ExitCode() > 255)
}

// endless reports whether Ctrl-C ends a command without an error.
func endless(command *cobra.Command, rest []string) bool {
	switch command.Name() {
	case "tap", "top":
		return true
	case "ping":
		return command.ParseFlags(rest) == nil && command.Flag("count").Value.String() == "0"
	}
	return false
}

// kubectlFailed returns the error of a command of kubectl. kubectl itself has printed why it failed.
func kubectlFailed(err error) error {
	exit, exited := errors.AsType[*exec.ExitError](err)
	switch {
	case err == nil:
		return nil
	case exited && !interrupted(err):
		return &exitError{exit.ExitCode(), nil}
	case exited:
		return &exitError{exitRuntime, fmt.Errorf("kubectl has ended: %w", err)}
	case errors.Is(err, exec.ErrNotFound):
		return &exitError{exitRuntime, errors.New("no folder of PATH has the program kubectl: " +
			"install kubectl, or add its folder to PATH")}
	}
	return &exitError{exitRuntime, err}
}

// diag runs `tunnel diag` in the pod, and writes the archive that it prints into a file on this machine.
func (p *plugin) diag(ctx context.Context, pod *cloudPod, command *cobra.Command, rest []string) error {
	if err := command.ParseFlags(rest); err != nil {
		return err
	}
	name := cmp.Or(command.Flag("file").Value.String(), diagName())
	args := append(pod.remote(command, append([]string{"diag"}, rest...)), "--file="+toStdout)
	if name == toStdout {
		return p.exec(ctx, pod, args, p.cmd.OutOrStdout())
	}
	f, err := newDiagFile(name)
	if err != nil {
		return err
	}
	err = p.exec(ctx, pod, args, f)
	if closed := f.Close(); err == nil && closed != nil {
		err = &exitError{exitRuntime, closed}
	}
	if err == nil && ctx.Err() != nil {
		err = &exitError{exitRuntime, errors.New("stopped by a signal")}
	}
	if err == nil {
		err = checkZip(name)
	}
	if err != nil {
		os.Remove(name) //nolint:errcheck // the first error says more
		return err
	}
	_, err = fmt.Fprintln(p.cmd.OutOrStdout(), name)
	return err
}

// checkZip returns an error unless a file is a whole archive: kubectl may end without an error when it loses the pod.
func checkZip(name string) error {
	z, err := zip.OpenReader(name)
	if err != nil {
		return &exitError{exitRuntime, fmt.Errorf("the archive from the pod is not whole: run the command again: %w", err)}
	}
	return z.Close()
}

// newPluginCompletion returns the command that kubectl runs to complete the words behind `kubectl edgetunnel`. Its
// output is that of cobra's completions.
func newPluginCompletion() *cobra.Command {
	return &cobra.Command{
		Use: kubectlComplete, DisableFlagParsing: true, SilenceErrors: true, SilenceUsage: true,
		RunE: func(cmd *cobra.Command, words []string) error {
			p := newPlugin()
			p.cmd.SetOut(cmd.OutOrStdout())
			p.cmd.SetErr(io.Discard)
			ctx, cancel := context.WithTimeout(cmd.Context(), completeTime)
			defer cancel()
			if len(words) == 0 || !p.complete(ctx, words[:len(words)-1], words[len(words)-1]) {
				fmt.Fprintf(cmd.OutOrStdout(), ":%d\n", cobra.ShellCompDirectiveNoFileComp)
			}
			return nil
		},
	}
}

// complete prints what may follow words and begins with prefix. It reports whether the pod has answered.
func (p *plugin) complete(ctx context.Context, words []string, prefix string) bool {
	if p.cmd.ParseFlags(words) != nil { // a flag lacks its value
		return false
	}
	args, local := p.cmd.Flags().Args(), newRoot()
	if len(args) == 0 {
		for _, name := range slices.Sorted(maps.Keys(pluginCommands())) {
			if c, _, err := local.Find([]string{name}); err == nil && strings.HasPrefix(name, prefix) {
				fmt.Fprintf(p.cmd.OutOrStdout(), "%s\t%s\n", name, c.Short)
			}
		}
		return false
	}
	if _, known := pluginCommands()[args[0]]; !known {
		return false
	}
	command, _, err := local.Find(args)
	if err != nil {
		return false
	}
	pod, err := p.choose(ctx, asksAll)
	if err != nil {
		return false
	}
	return p.exec(ctx, pod, append([]string{cobra.ShellCompRequestCmd}, pod.remote(command, append(args, prefix))...),
		p.cmd.OutOrStdout()) == nil
}

// untilInputEnds is a hidden flag of every command: end when standard input ends. The plugin uses it.
const untilInputEnds = "until-input-ends"

// endWithInput adds the flag untilInputEnds to root.
func endWithInput(root *cobra.Command) {
	until := root.PersistentFlags().Bool(untilInputEnds, false, "end when standard input ends")
	if err := root.PersistentFlags().MarkHidden(untilInputEnds); err != nil {
		panic(err) // the flag was added a line above
	}
	before := root.PersistentPreRunE
	root.PersistentPreRunE = func(cmd *cobra.Command, args []string) error {
		if *until {
			ctx, cancel := context.WithCancel(cmd.Context())
			in := cmd.InOrStdin()
			go func() {
				io.Copy(io.Discard, in) // an input that cannot be read has ended
				cancel()
			}()
			cmd.SetContext(ctx)
		}
		return before(cmd, args)
	}
}
