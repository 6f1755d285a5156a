package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// newManCommand returns the hidden command that writes the man pages for packages.
//
// github.com/spf13/cobra/doc is not used: it joins the lines of examples, needs three more modules, and
// the Markdown parser among them has no maintainer.
func newManCommand() *cobra.Command {
	return &cobra.Command{
		Use: "man DIR", Hidden: true,
		Short: "Write a man page for each command into a folder",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			date, err := manDate(os.Getenv("SOURCE_DATE_EPOCH"))
			if err != nil {
				return &exitError{exitUsage, err}
			}
			if err = errors.Join(writeManPages(cmd.Root(), args[0], date),
				writeManPages(newPlugin().cmd, args[0], date)); err != nil {
				return &exitError{exitRuntime, err}
			}
			return nil
		},
	}
}

// manDate returns the date of the pages, from the variable SOURCE_DATE_EPOCH in seconds
// (reproducible-builds.org/specs/source-date-epoch). Without the variable the pages have no date, so that
// two builds of one source make the same pages.
func manDate(epoch string) (string, error) {
	if epoch == "" {
		return "", nil
	}
	seconds, err := strconv.ParseInt(epoch, 10, 64)
	if err != nil {
		return "", fmt.Errorf("SOURCE_DATE_EPOCH is a number of seconds, not %q", epoch)
	}
	return time.Unix(seconds, 0).UTC().Format(time.DateOnly), nil
}

// writeManPages writes the pages of cmd and of all commands below it into an existing folder.
func writeManPages(cmd *cobra.Command, dir, date string) error {
	path := filepath.Join(dir, manName(cmd)+".1")
	if err := os.WriteFile(path, []byte(manPage(cmd, date)), publicPage); err != nil {
		return err
	}
	for _, c := range documented(cmd) {
		if err := writeManPages(c, dir, date); err != nil {
			return err
		}
	}
	return nil
}

// publicPage is the file mode of a man page.
const publicPage = 0o644

// documented returns the commands directly below cmd that have a page.
func documented(cmd *cobra.Command) []*cobra.Command {
	return slices.DeleteFunc(slices.Clone(cmd.Commands()), func(c *cobra.Command) bool {
		return !c.IsAvailableCommand() || c.Name() == "help"
	})
}

// manName returns the name of a command's page, such as tunnel-token-create.
func manName(cmd *cobra.Command) string { return strings.ReplaceAll(cmd.CommandPath(), " ", "-") }

// manPage returns the page of a command in section 1, written with the macros of man(7).
func manPage(cmd *cobra.Command, date string) string {
	var b strings.Builder
	fmt.Fprintf(&b, ".TH %q 1 %q %q %q\n.nh\n", strings.ToUpper(manName(cmd)), date, "tunnel "+software(), "tunnel")
	fmt.Fprintf(&b, ".SH NAME\n%s \\- %s\n", roff(manName(cmd)), roff(cmd.Short))
	fmt.Fprintf(&b, ".SH SYNOPSIS\n\\fB%s\\fR\n", roff(cmd.UseLine()))
	b.WriteString(".SH DESCRIPTION\n")
	writeRoff(&b, longOf(cmd))
	writeFlags(&b, "OPTIONS", cmd.NonInheritedFlags())
	writeFlags(&b, "OPTIONS OF ALL COMMANDS", cmd.InheritedFlags())
	var also []string
	if cmd.HasParent() {
		also = append(also, manName(cmd.Parent()))
	}
	for _, c := range documented(cmd) {
		also = append(also, manName(c))
	}
	for i, name := range also {
		also[i] = `\fB` + roff(name) + `\fR(1)`
	}
	if len(also) > 0 {
		fmt.Fprintf(&b, ".SH SEE ALSO\n%s\n", strings.Join(also, ",\n"))
	}
	return b.String()
}

// longOf returns the description of a command.
func longOf(cmd *cobra.Command) string {
	if cmd.Long != "" {
		return cmd.Long
	}
	return cmd.Short + "."
}

// writeRoff writes a text of paragraphs. An indented paragraph is an example, whose lines stay as they are.
func writeRoff(b *strings.Builder, text string) {
	for i, paragraph := range strings.Split(strings.Trim(text, "\n"), "\n\n") {
		if i > 0 {
			b.WriteString(".PP\n")
		}
		example := strings.HasPrefix(paragraph, " ") || strings.HasPrefix(paragraph, "\t")
		if example {
			b.WriteString(".RS 4\n.nf\n")
		}
		for line := range strings.SplitSeq(paragraph, "\n") {
			b.WriteString(roff(strings.TrimSpace(line)) + "\n")
		}
		if example {
			b.WriteString(".fi\n.RE\n")
		}
	}
}

// writeFlags writes a section with the flags that are not hidden, if there are any.
func writeFlags(b *strings.Builder, title string, flags *pflag.FlagSet) {
	if !flags.HasAvailableFlags() {
		return
	}
	b.WriteString(".SH " + title + "\n")
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Hidden {
			return
		}
		b.WriteString(".TP\n")
		if f.Shorthand != "" {
			fmt.Fprintf(b, `\fB%s\fR, `, roff("-"+f.Shorthand))
		}
		value, usage := pflag.UnquoteUsage(f)
		fmt.Fprintf(b, `\fB%s\fR`, roff("--"+f.Name))
		if value != "" {
			fmt.Fprintf(b, ` \fI%s\fR`, roff(value))
		}
		if !slices.Contains([]string{"", "false", "0", "[]"}, f.DefValue) {
			usage += " (default " + f.DefValue + ")"
		}
		b.WriteString("\n" + roff(usage) + "\n")
	})
}

// roff returns a line as troff input that prints as the line does, and that can be copied into a shell
// (groff_char(7)).
func roff(line string) string {
	line = strings.NewReplacer(`\`, `\e`, "-", `\-`, "'", `\(aq`, "`", `\(ga`, "^", `\(ha`, "~", `\(ti`).Replace(line)
	if strings.HasPrefix(line, ".") {
		return `\&` + line
	}
	return line
}
