package main

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
)

// says runs a command line in this process, and returns what it prints.
func says(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	code = run(t.Context(), args, &out, &errs)
	return code, out.String(), errs.String()
}

// Completion offers these commands and no other ones: `man` and SuperEdge's flags are for programs.
func TestCompletion(t *testing.T) {
	for line, want := range map[string]string{
		"": "cert check cloud cni completion config demo diag drain edge forget forward help init join ls ping reload " +
			"restart services status tap token top trace version",
		"token ":            "create list revoke",
		"config ":           "check",
		"completion ":       "bash fish powershell zsh",
		"co":                "completion config",
		"init --s":          "--san --secret --systemd",
		"--":                "--help --log-format --log-level --version",
		"token revoke --no": "--node",
		"ls -o ":            "json table wide yaml",
		"status -o ":        "json text wide yaml",
		"join --": "--dir --force --help --log-format --log-level --node --proxy --proxy-ca --proxy-file --server " +
			"--systemd --token-file",
		"cloud --config ./x": "toml",
		"forward add ":       "", // no cloud answers
		"forward rm ":        "",
		"top -o ":            "json table wide yaml",
		"tap -o ":            "json table wide yaml",
		"token list -o ":     "json table yaml",
	} {
		words := strings.Split(line, " ")
		code, out, _ := says(t, append([]string{"__complete"}, words...)...)
		var got []string
		for l := range strings.Lines(out) {
			if word, _, _ := strings.Cut(strings.TrimSpace(l), "\t"); word != "" && word[0] != ':' {
				got = append(got, strings.TrimSuffix(word, "="))
			}
		}
		slices.Sort(got)
		if code != exitOK || strings.Join(slices.Compact(got), " ") != want {
			t.Errorf("%q: exit code %d, %q; want %q", line, code, got, want)
		}
	}
}

// No command offers files as its arguments.
func TestCompletesNoFiles(t *testing.T) {
	noFiles := fmt.Sprintf(":%d\n", cobra.ShellCompDirectiveNoFileComp)
	commands := leaves(newRoot())
	if len(commands) < 25 {
		t.Errorf("there are %d commands", len(commands))
	}
	for _, c := range commands {
		words := strings.Fields(c.CommandPath())[1:]
		code, out, _ := says(t, append(append([]string{"__complete"}, words...), "")...)
		if code != exitOK || !strings.Contains(out, noFiles) {
			t.Errorf("%s: exit code %d, completion %q; want %q", c.CommandPath(), code, out, noFiles)
		}
	}
}

// Values that a command writes one after another can be told apart, in each form.
func TestDocuments(t *testing.T) {
	for form, want := range map[string]string{
		"json": "{\n  \"mode\": \"cloud\",\n  \"conns\": 1\n}\n{\"mode\":\"edge\",\"conns\":0}\n",
		"yaml": "conns: 1\nmode: cloud\n---\nconns: 0\nmode: edge\n",
		"text": "",
	} {
		var out bytes.Buffer
		output := outputFlag{form: form}
		done, err := output.encode(&out, drained{Mode: "cloud", Conns: 1})
		again, errAgain := output.encodeLine(&out, drained{Mode: "edge"})
		if out.String() != want || err != nil || errAgain != nil || done != (want != "") || again != done {
			t.Errorf("-o %s: %q, %v, %v; want %q", form, out.String(), err, errAgain, want)
		}
	}
}

// Each shell has a script, and help shows the command that prints it.
func TestCompletionScripts(t *testing.T) {
	for shell, want := range map[string]string{
		"bash": "complete -o default", "zsh": "#compdef tunnel", "fish": "complete -c tunnel",
		"powershell": "Register-ArgumentCompleter",
	} {
		if code, out, errs := says(t, "completion", shell); code != exitOK || !strings.Contains(out, want) {
			t.Errorf("%s: exit code %d, %s, and no %q in %d bytes", shell, code, errs, want, len(out))
		}
	}
	if _, out, _ := says(t, "--help"); !strings.Contains(out, "\n  completion ") {
		t.Errorf("help does not show completion:\n%s", out)
	}
	_, script, _ := says(t, "completion", "bash")
	cmd := exec.Command("bash", "-n")
	cmd.Stdin = strings.NewReader(script)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("bash does not take its script: %v\n%s", err, out)
	}
}

// A mistyped command is told what it may have meant, flags behind it or not. A secret is not repeated.
func TestDidYouMean(t *testing.T) {
	for line, want := range map[string]string{
		"clod":                          `unknown command "clod" for "tunnel": did you mean cloud?`,
		"clod -c cloud.toml":            `unknown command "clod" for "tunnel": did you mean cloud?`,
		"edeg --config x":               `unknown command "edeg" for "tunnel": did you mean edge?`,
		"token creat --node n":          `unknown command "creat" for "tunnel token": did you mean create?`,
		"config chek":                   `unknown command "chek" for "tunnel config": did you mean check?`,
		"statistics":                    `unknown command "statistics" for "tunnel"` + "\n",
		"staus":                         "did you mean status?",
		"co":                            "did you mean cni or completion or config or ls or top?",
		"--frobnicate":                  "unknown flag: --frobnicate",
		"cloud --frobnicate":            "unknown flag: --frobnicate",
		"0123456789abcdef0123456789 -c": `unknown command "***" for "tunnel"`,
	} {
		code, _, errs := says(t, strings.Fields(line)...)
		if code != exitUsage || !strings.Contains(errs, want) {
			t.Errorf("tunnel %s: exit code %d and %q, want %d and %q", line, code, errs, exitUsage, want)
		}
	}
}

// --version is version. A build by the linker's values, by `go install` and by `go build` each knows what
// it is.
func TestVersion(t *testing.T) {
	_, want, _ := says(t, "version")
	if code, got, errs := says(t, "--version"); code != exitOK || got != want || !strings.HasPrefix(got, "tunnel ") {
		t.Errorf("tunnel --version: exit code %d, %q, %q; want %q", code, got, errs, want)
	}
	built := func(version string, settings ...debug.BuildSetting) *debug.BuildInfo {
		return &debug.BuildInfo{Main: debug.Module{Version: version}, Settings: settings}
	}
	revision := debug.BuildSetting{Key: "vcs.revision", Value: "990dbab"}
	modified := debug.BuildSetting{Key: "vcs.modified", Value: "true"}
	clean := debug.BuildSetting{Key: "vcs.modified", Value: "false"}
	for name, tt := range map[string]struct {
		version, commit         string // of the linker
		info                    *debug.BuildInfo
		wantVersion, wantCommit string
	}{
		"a release":  {"v0.1.0", "abc", built("(devel)"), "v0.1.0", "abc"},
		"make build": {"990dbab-dirty", "", built("(devel)"), "990dbab-dirty", ""},
		"go install": {"", "", built("v0.1.0"), "v0.1.0", ""},
		"go build":   {"", "", built("(devel)", revision, clean), "devel", "990dbab"},
		"go build, edited": {
			"", "", built("(devel)", revision, modified), "devel", "990dbab and changes that are in no commit",
		},
		"no information": {"", "", nil, "devel", ""},
	} {
		if v, c := versionOf(tt.version, tt.info), commitOf(tt.commit, tt.info); v != tt.wantVersion || c != tt.wantCommit {
			t.Errorf("%s: version %q, commit %q; want %q, %q", name, v, c, tt.wantVersion, tt.wantCommit)
		}
	}
}

// Without -c a command reads the files that init and join write, as far as there are any.
func TestDefaultConfig(t *testing.T) {
	dir := t.TempDir()
	cloud, edge := filepath.Join(dir, "cloud.toml"), filepath.Join(dir, "edge.toml")
	flag := configFlag{defaults: []string{cloud, edge}}
	if files, err := flag.files(); err == nil || !strings.Contains(err.Error(),
		"-c FILE: there is no "+cloud+" and no "+edge) {
		t.Errorf("without files: %q, %v", files, err)
	}
	for _, want := range [][]string{{edge}, {cloud, edge}} {
		if err := os.WriteFile(want[0], nil, 0o600); err != nil {
			t.Fatal(err)
		}
		files, err := flag.files()
		path, errPath := flag.path()
		if err != nil || errPath != nil || !slices.Equal(files, want) || path != want[0] {
			t.Errorf("the files are %q (%q), %v; want %q", files, path, err, want)
		}
	}
	flag.file = "mine.toml"
	if files, err := flag.files(); err != nil || !slices.Equal(files, []string{"mine.toml"}) {
		t.Errorf("with -c: %q, %v", files, err)
	}

	for line, name := range map[string]string{
		"cloud": "cloud.toml", "edge": "edge.toml", "token list": "cloud.toml", "token create --node n": "cloud.toml",
		"token revoke --node n": "cloud.toml", "config check": "cloud.toml and no /etc/tunnel/edge.toml",
	} {
		if there, _ := filepath.Glob("/etc/tunnel/*.toml"); there != nil {
			t.Skipf("this machine is a node or a cloud: %q", there)
		}
		code, _, errs := says(t, strings.Fields(line)...)
		if want := "there is no /etc/tunnel/" + name; code != exitUsage || !strings.Contains(errs, want) {
			t.Errorf("tunnel %s: exit code %d, %q; want %d, %q", line, code, errs, exitUsage, want)
		}
	}
}

// Flags of init and join that exclude or need each other, and a pod that does not know its namespace.
func TestInitFlags(t *testing.T) {
	t.Setenv("POD_NAMESPACE", "")
	for line, want := range map[string]string{
		"--secret s":                          "missing [configmap]",
		"--configmap c":                       "missing [secret]",
		"--secret s --configmap c --dir /srv": "none of the others can be",
		"--secret s --configmap c --systemd":  "none of the others can be",
		"--secret s --configmap c":            "POD_NAMESPACE is not set",
		// With this address, init would write nothing into /etc/tunnel.
		"--secret= --configmap c --address b": "each need a name",
		"--secret s --configmap= --address b": "each need a name",
		"--secret= --configmap= --address b":  "each need a name",
		"--dir /nonexistent --san no_ip:9000": `--san: "no_ip:9000" is neither a name nor an IP address`,
	} {
		code, _, errs := says(t, append([]string{"init", "--address", "a:9000"}, strings.Fields(line)...)...)
		if code != exitUsage || !strings.Contains(errs, want) {
			t.Errorf("init %s: exit code %d, %q; want %d, %q", line, code, errs, exitUsage, want)
		}
	}
	for _, proxy := range []string{"http://10.0.0.1:3128", "none", "env"} {
		code, _, errs := says(t, "join", "--token-file", "none", "--proxy-file", "none", "--proxy", proxy)
		if code != exitUsage || !strings.Contains(errs, "none of the others can be") {
			t.Errorf("join with two proxies: exit code %d, %q; want %d", code, errs, exitUsage)
		}
	}
}

// A command whose output cannot be written has failed while running: exit code 1, and no advice about the
// command line.
func TestFullDisk(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Skipf("this system has no file that is always full: %v", err)
	}
	defer full.Close()
	dir := filepath.Join(t.TempDir(), "cloud")
	if code, _, errs := says(t, "init", "--address", "127.0.0.1:9000", "--dir", dir); code != exitOK {
		t.Fatalf("init: exit code %d, %s", code, errs)
	}
	c := " -c " + filepath.Join(dir, cloudFile)
	for _, line := range []string{
		"token list" + c, "token list --json" + c, // no token
		"token create --node edge1" + c, "token create --json --node edge1" + c, "token create -o yaml --node edge1" + c,
		"token list" + c, "token list --json" + c, "token list -o yaml" + c,
		"completion bash", "completion zsh", "completion fish", "completion powershell",
	} {
		var errs bytes.Buffer
		code := run(t.Context(), strings.Fields(line), full, &errs)
		if code != exitRuntime || !strings.Contains(errs.String(), "no space left on device") ||
			strings.Contains(errs.String(), "--help") {
			t.Errorf("tunnel %s: exit code %d, %q; want %d", line, code, &errs, exitRuntime)
		}
	}
}

// A flag that takes no value is shown without one.
func TestDemoHelp(t *testing.T) {
	_, out, _ := says(t, "demo", "--help")
	if !strings.Contains(out, "\n      --once            ") || !strings.Contains(out, `print "ok NAME" for each`) {
		t.Errorf("the help of demo is\n%s", out)
	}
}

// Every command has a page, the same at each run. Examples keep their lines, and can be copied.
func TestManPages(t *testing.T) {
	t.Setenv("SOURCE_DATE_EPOCH", "")
	pages := func() map[string]string {
		dir := t.TempDir()
		if code, _, errs := says(t, "man", dir); code != exitOK {
			t.Fatalf("exit code %d: %s", code, errs)
		}
		files, err := filepath.Glob(filepath.Join(dir, "*"))
		if err != nil {
			t.Fatal(err)
		}
		all := make(map[string]string)
		for _, f := range files {
			text, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			all[filepath.Base(f)] = string(text)
		}
		return all
	}
	all := pages()
	for _, name := range []string{
		"tunnel", "tunnel-cloud", "tunnel-edge", "tunnel-init", "tunnel-join", "tunnel-demo", "tunnel-version",
		"tunnel-token", "tunnel-token-create", "tunnel-token-list", "tunnel-token-revoke", "tunnel-config",
		"tunnel-config-check", "tunnel-ls", "tunnel-forget", "tunnel-status", "tunnel-ping",
		"tunnel-tap", "tunnel-top", "tunnel-trace",
		"tunnel-completion", "tunnel-completion-bash",
	} {
		if all[name+".1"] == "" {
			t.Errorf("there is no page %s(1)", name)
		}
	}
	for _, name := range []string{"tunnel-man", "tunnel-help"} {
		if all[name+".1"] != "" {
			t.Errorf("there is a page %s(1)", name)
		}
	}
	for file, wants := range map[string][]string{
		"tunnel.1": {
			`.TH "TUNNEL" 1 "" "tunnel ` + software() + `" "tunnel"`, `\fBtunnel\-token\fR(1)`,
			".PP\n.RS 4\n.nf\ntunnel init \\-\\-address HOST:PORT  ", "\\fB\\-\\-log\\-level\\fR \\fIstring\\fR\n",
			"(default info)",
		},
		"tunnel-join.1": {
			".nf\necho \\(aqtunnel1.…\\(aq | sudo tunnel join \\-\\-systemd\n", `\fBtunnel\fR(1)`,
			`\fB\-\-token\-file\fR \fIfile\fR`,
		},
		"tunnel-cloud.1": {`\fB\-c\fR, \fB\-\-config\fR \fIFILE\fR`, ".SH OPTIONS OF ALL COMMANDS\n"},
	} {
		for _, want := range wants {
			if !strings.Contains(all[file], want) {
				t.Errorf("%s lacks %q:\n%s", file, want, all[file])
			}
		}
	}
	if strings.Contains(all["tunnel.1"], "alsologtostderr") {
		t.Error("tunnel(1) shows flags of SuperEdge")
	}
	for name, text := range pages() {
		if text != all[name] {
			t.Errorf("two runs write two pages %s", name)
		}
	}
	t.Setenv("SOURCE_DATE_EPOCH", "1700000000")
	if want := `.TH "TUNNEL" 1 "2023-11-14" `; !strings.Contains(pages()["tunnel.1"], want) {
		t.Errorf("with SOURCE_DATE_EPOCH the page lacks %q", want)
	}
	t.Setenv("SOURCE_DATE_EPOCH", "yesterday")
	if code, _, errs := says(t, "man", t.TempDir()); code != exitUsage || !strings.Contains(errs, "number of seconds") {
		t.Errorf("a date that is none: exit code %d, %s", code, errs)
	}
}
