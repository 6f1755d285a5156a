package main

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"tunnel.example/tunnel/internal/testkit"
)

const commandsHead = `# Commands

<!-- Made by "make docs" from the commands of cmd/tunnel. A test compares. -->

This page lists every command of tunnel with its flags.
` + "`tunnel COMMAND --help`" + ` prints the same.

tunnel also accepts SuperEdge's command line: ` + "`tunnel --m=cloud --c=FILE` and `tunnel --m=edge --c=FILE`" + `.
`

// flagTable lists the flags that the program shows.
func flagTable(flags *pflag.FlagSet) string {
	b := new(strings.Builder)
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Hidden || f.Name == "help" {
			return
		}
		value, usage := pflag.UnquoteUsage(f)
		name := "--" + f.Name
		if f.Shorthand != "" {
			name = "-" + f.Shorthand + ", " + name
		}
		if value != "" {
			name += " " + value
		}
		byDefault := "–"
		_, required := f.Annotations[cobra.BashCompOneRequiredFlag]
		switch {
		case required:
			byDefault = "required"
		case f.DefValue != "" && f.DefValue != "false":
			byDefault = "`" + f.DefValue + "`"
		}
		fmt.Fprintf(b, "| `%s` | %s | %s |\n", name, byDefault, strings.ReplaceAll(usage, "|", `\|`))
	})
	if b.Len() == 0 {
		return ""
	}
	return "\n| flag | default | what it does |\n|---|---|---|\n" + b.String()
}

// typed matches the indentation of a command to type.
var typed = regexp.MustCompile(`(?m)^(?:  |\t)`)

// prose turns the long text of a command into Markdown. Lines that begin with two spaces or a tab are
// commands to type, in a block of their own; no test runs this block.
func prose(long string) string {
	b := new(strings.Builder)
	for i, part := range strings.Split(strings.TrimSpace(long), "\n\n") {
		if i > 0 {
			b.WriteString("\n")
		}
		if typed.MatchString(part) {
			fmt.Fprintf(b, "```text\n%s\n```\n", typed.ReplaceAllString(part, ""))
			continue
		}
		if strings.HasPrefix(part, exitCodes) {
			b.WriteString("### Exit codes\n\n")
		}
		b.WriteString(strings.ReplaceAll(strings.ReplaceAll(part, "\n", " "), ". ", ".\n") + "\n")
	}
	return strings.ReplaceAll(b.String(), "```\n\n```text\n", "\n")
}

// commandPart returns the part of the page about a command, and about its subcommands.
func commandPart(c *cobra.Command) string {
	b := new(strings.Builder)
	if c.Runnable() && !c.HasSubCommands() || !c.HasParent() {
		fmt.Fprintf(b, "\n## `%s`\n\n", c.CommandPath())
		if c.Long == "" || c.HasParent() {
			fmt.Fprintf(b, "%s.\n\n", c.Short)
		}
		if c.HasParent() {
			fmt.Fprintf(b, "```text\n%s\n```\n", c.UseLine())
		}
		if c.Long != "" {
			b.WriteString("\n" + prose(c.Long))
		}
		if c.HasParent() || !c.HasSubCommands() {
			b.WriteString(flagTable(c.LocalFlags()))
		} else {
			b.WriteString("\n### Flags of every command\n" + flagTable(c.PersistentFlags()))
			if own := flagTable(c.LocalNonPersistentFlags()); own != "" {
				b.WriteString("\n### Flags of `tunnel` without a command\n" + own)
			}
		}
	}
	for _, sub := range c.Commands() {
		if !sub.Hidden && sub.Name() != "help" {
			b.WriteString(commandPart(sub))
		}
	}
	return strings.ReplaceAll(b.String(), "\n\n\n", "\n\n")
}

// exitCodes begins the paragraph of a long text that lists the exit codes.
const exitCodes = "Exit codes:"

// TestCommandsPage: docs/commands.md is up to date. The program lists every exit code, and every command.
func TestCommandsPage(t *testing.T) {
	root := newRoot()
	root.InitDefaultCompletionCmd()
	page := commandsHead + commandPart(root) + commandPart(newPlugin().cmd)
	if n := strings.Count(page, "\n## `tunnel "); n < 9 {
		t.Errorf("the page has %d commands", n)
	}
	_, codes, _ := strings.Cut(root.Long, exitCodes)
	for code := exitOK; code <= exitAway; code++ {
		if !strings.Contains(codes, fmt.Sprintf(" %d ", code)) && !strings.Contains(codes, fmt.Sprintf("\n%d ", code)) {
			t.Errorf("the long text of tunnel does not have the exit code %d", code)
		}
	}
	for _, c := range root.Commands() {
		// Programs run man and cni, cobra adds completion, and services has a line for all of its commands.
		listed := regexp.MustCompile(`(?m)^  tunnel ` + c.Name() + `\b`).MatchString(root.Long)
		if !c.Hidden && !listed && !slices.Contains([]string{"cni", "completion", "help", "version"}, c.Name()) {
			t.Errorf("the overview of tunnel lacks %s", c.Name())
		}
	}
	testkit.Page(t, "../../docs/commands.md", page)
}

// The help of each command says which exit codes it has, in order. Cobra's own commands print scripts and help.
func TestExitCodes(t *testing.T) {
	number := regexp.MustCompile(`(?:^|[,;.] )(\d) `)
	seen := 0
	for _, c := range leaves(newRoot()) {
		if c.Name() == "version" {
			continue // it does not fail
		}
		_, codes, ok := strings.Cut(c.Long, "\n\n"+exitCodes+" ")
		found := number.FindAllStringSubmatch(strings.ReplaceAll(codes, "\n", " "), -1)
		if !ok || len(found) < 2 || found[0][1] != "0" {
			t.Errorf("the help of %s has no paragraph %s\n%s", c.CommandPath(), exitCodes, c.Long)
			continue
		}
		for i := range found {
			if code := found[i][1]; code > fmt.Sprint(exitAway) {
				t.Errorf("%s has the exit code %s, which the root command lacks", c.CommandPath(), code)
			}
		}
		seen++
	}
	if seen < 25 {
		t.Errorf("%d commands have exit codes", seen)
	}
}

// leaves returns the commands below cmd that a user may run.
func leaves(cmd *cobra.Command) (all []*cobra.Command) {
	if !cmd.HasSubCommands() {
		return []*cobra.Command{cmd}
	}
	for _, c := range cmd.Commands() {
		if !c.Hidden {
			all = append(all, leaves(c)...)
		}
	}
	return all
}
