package main

import (
	"fmt"
	"regexp"
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

// TestCommandsPage: docs/commands.md is up to date, and the program lists every exit code.
func TestCommandsPage(t *testing.T) {
	root := newRoot()
	root.InitDefaultCompletionCmd()
	page := commandsHead + commandPart(root) + commandPart(newPlugin().cmd)
	if n := strings.Count(page, "\n## `tunnel "); n < 9 {
		t.Errorf("the page has %d commands", n)
	}
	_, codes, _ := strings.Cut(root.Long, exitCodes)
	for code := exitOK; code <= exitRefused; code++ {
		if !strings.Contains(codes, fmt.Sprintf(" %d ", code)) && !strings.Contains(codes, fmt.Sprintf("\n%d ", code)) {
			t.Errorf("the long text of tunnel does not have the exit code %d", code)
		}
	}
	testkit.Page(t, "../../docs/commands.md", page)
}
